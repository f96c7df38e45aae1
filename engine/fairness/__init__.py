"""The order of requests: shares of lanes, tenants and adapters, and the order inside each share."""
