"""Outputs that are held to a grammar: schemas made into one, compiling beside the steps, a matcher for each request.

Only requests with a grammar bring llguidance into the process.
"""
