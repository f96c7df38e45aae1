"""What callers may take: rates, quotas, and who may wait for the engine."""
