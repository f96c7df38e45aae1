"""The CPU kernels in C++ and their bindings."""
