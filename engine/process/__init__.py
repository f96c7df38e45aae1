"""The engine in a process of its own, and its client in the server."""
