"""HTTP itself: the wire, bodies, request ids, the OpenAPI page and static files."""
