"""Measurements of a GPU, in verbs. Each verb is time-boxed, goes on where it stopped, and fails case by case."""
