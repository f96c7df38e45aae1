"""The arena, its pages and who holds them. Does not know what pages mean to a model."""
