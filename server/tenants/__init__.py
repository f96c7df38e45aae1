"""Tenants, their keys, grants and the audit log over HTTP."""
