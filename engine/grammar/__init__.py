"""Outputs that follow a grammar: schemas as grammars, compiling beside the steps, a matcher for each request.

The process imports llguidance only for a request with a grammar.
"""
