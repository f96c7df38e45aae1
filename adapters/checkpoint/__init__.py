"""Reads and checks adapters as PEFT and mlx-lm write them. Takes strangers' files."""
