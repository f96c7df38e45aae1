"""The database: engines, tables and migrations."""
