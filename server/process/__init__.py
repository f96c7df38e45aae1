"""The process that serves: threads and turns of tenants, long work, logs, and its end."""
