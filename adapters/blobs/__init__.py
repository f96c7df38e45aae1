"""Checkpoint files by SHA-256, in a folder or in S3."""
