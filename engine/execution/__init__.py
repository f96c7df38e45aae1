"""Carrying out a step plan on the device, and what that costs."""
