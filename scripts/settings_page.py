"""Write the tables of docs/settings.md from manylora/config.py; with --check only say whether they are up to date."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

from manylora.cli.config import explained

PAGE = Path(__file__).resolve().parent.parent / "docs" / "settings.md"
MARK = "<!-- settings: scripts/settings_page.py -->\n"


def tables() -> str:
    """A table for each section."""
    lines = []
    for section, purpose, settings in explained():
        lines += [
            f"\n## {section}\n",
            f"{purpose}\n",
            "| setting | default | what it does |",
            "|---|---|---|",
        ]
        for name, default, sentence in settings:
            if default is None or default is dataclasses.MISSING:
                shown = "not set" if default is None else "none"
            else:
                shown = (
                    f"`{default}`"
                    if default and isinstance(default, str)
                    else f"`{json.dumps(default)}`"
                )
            lines.append(f"| `{section}.{name}` | {shown} | {sentence} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write the page, or compare it."""
    text = PAGE.read_text()
    head, _, _ = text.partition(MARK)
    wanted = f"{head}{MARK}{tables()}"
    if "--check" in sys.argv:
        if text != wanted:
            print("docs/settings.md is out of date: run python scripts/settings_page.py")
        return int(text != wanted)
    PAGE.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
