"""Limits of callers: rates, quotas, and the queue before the engine."""
