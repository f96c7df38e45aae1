"""Many servers over one registry: gateways that take requests, and replicas that compute them."""
