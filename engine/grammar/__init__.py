"""Outputs that are held to a grammar: JSON schemas made into one, compiled beside the steps, a matcher for each request, a mask for each token.

Only requests with a grammar bring llguidance into the process.
"""
