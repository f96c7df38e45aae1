"""Servers under load: a generator of requests over HTTP, and servers that are started for a benchmark."""
