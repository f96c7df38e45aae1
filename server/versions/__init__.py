"""Versions of adapters in this server: names, pins, weights in memory, and the blobs of those that are gone."""
