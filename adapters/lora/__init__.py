"""A LoRA as pages: layout, packing, tables and the work of a step."""
