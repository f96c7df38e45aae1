"""Records of tenants, keys, adapters and usage. Holds no tensors and speaks no HTTP."""
