"""One question per command; results carry command, commit and hardware.

`floor`, `offline` and `load` ask how fast; `adapter_count`, `cliff`, `unified`, `page_waste` and `step_stall` ask what
one pool under pressure does. The others are what these share.
"""
