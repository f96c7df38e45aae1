"""A checkpoint read into a decoder, and written again with quantised weights."""
