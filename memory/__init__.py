"""The arena, its pages and their holders. Knows nothing of models."""
