"""Which adapters are on the device, in host memory or on their way."""
