"""Admission of requests, between their authentication and their route."""
