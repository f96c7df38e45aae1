"""What computes: kernels, steps, and all that a step waits for, in one process."""
