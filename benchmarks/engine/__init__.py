"""Kernels, steps and the work beside them, measured in one process."""
