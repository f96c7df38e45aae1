"""Starts gateways and replicas: as processes of this machine, or with Ray."""
