"""Completions and chat: from a request's body to its answer and its usage event."""
