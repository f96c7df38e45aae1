"""Many servers over one registry: which of them serves a request."""
