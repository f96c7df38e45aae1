"""A LoRA from bytes to device: checkpoint, packing, residency, a step's work. Knows no scheduling, HTTP or SQL."""
