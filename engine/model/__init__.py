"""The decoder, described by data."""
