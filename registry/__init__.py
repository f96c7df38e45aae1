"""What exists and who used it: tenants, keys, adapters, usage. Holds no tensors and speaks no HTTP."""
