"""Starts servers: one for a command, or gateways and replicas as processes of this machine or with Ray."""
