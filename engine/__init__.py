"""Requests into tokens, one step at a time. Knows no SQL and no HTTP."""
