"""Outputs held to a grammar: JSON schemas made into one, compiling beside the steps, matchers, masks of tokens.

Only requests with a grammar bring llguidance into the process.
"""
