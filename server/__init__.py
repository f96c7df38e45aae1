"""The HTTP API. Knows no tensors."""
