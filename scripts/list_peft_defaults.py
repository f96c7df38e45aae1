"""List the fields of the installed PEFT's LoraConfig with their defaults, and which of them Manylora's tables lack.

    python scripts/list_peft_defaults.py

Run it when PEFT is upgraded, and put new fields into `adapters/checkpoint/peft_fields.py`.
"""

from __future__ import annotations

import json
from dataclasses import asdict

from peft import LoraConfig, __version__

from manylora.adapters.checkpoint.peft_fields import FEATURES, INERT_FIELDS, READ_FIELDS


def main() -> None:
    """Print one line per field; a star marks those that no table has."""
    print(f"PEFT {__version__}")
    for name, default in sorted(asdict(LoraConfig()).items()):
        known = name in READ_FIELDS or name in INERT_FIELDS or name in FEATURES
        print(f"{' ' if known else '*'} {name} = {json.dumps(default, default=str)}")


if __name__ == "__main__":
    main()
