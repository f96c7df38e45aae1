"""Whose turn it is: shares of lanes, tenants and adapters, and the order inside them."""
