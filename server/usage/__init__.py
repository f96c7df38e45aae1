"""GET /v1/usage and what it is made of."""
