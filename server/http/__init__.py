"""HTTP itself: the wire, bodies, forms, the OpenAPI page and static files."""
