"""A LoRA from bytes to device: checkpoint, packing, residency, segments. Knows no scheduling, HTTP or SQL."""
