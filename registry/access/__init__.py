"""Callers: tenants, their keys and sessions, and limits that servers share."""
