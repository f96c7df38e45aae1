"""Many adapters in a pool of few pages, measured in one process."""
