"""Adapters over HTTP: upload, check, publish, change, delete, and whether they would fit."""
