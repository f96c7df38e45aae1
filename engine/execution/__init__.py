"""Execution of a step plan on the device, and its costs."""
