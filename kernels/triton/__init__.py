"""The GPU kernels in Triton."""
