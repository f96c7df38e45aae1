"""Telemetry: metrics, and the live feed of the engine."""
