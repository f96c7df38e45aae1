"""What a GPU is asked. Each verb is time-boxed, goes on where it stopped, and fails case by case."""
