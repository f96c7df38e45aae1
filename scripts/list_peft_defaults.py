"""List the fields of the installed PEFT's LoraConfig with their defaults, and which of them Manylora's table lacks.

    python scripts/list_peft_defaults.py

Run it when PEFT is upgraded, and put new fields into `adapters/checkpoint/peft_fields.py`.
"""

from __future__ import annotations

import json
from dataclasses import asdict

from peft import LoraConfig, __version__

from manylora.adapters.checkpoint.peft_fields import FIELDS


def main() -> None:
    """Print one line per field; a star marks those that the table lacks."""
    print(f"PEFT {__version__}")
    for name, default in sorted(asdict(LoraConfig()).items()):
        print(f"{' ' if name in FIELDS else '*'} {name} = {json.dumps(default, default=str)}")


if __name__ == "__main__":
    main()
