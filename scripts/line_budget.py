"""Count the lines of the product that hold code, and fail above the budget.

Comments, docstrings and blank lines do not count. Raising the budget is a commit of its own, with a reason.
"""

from __future__ import annotations

import io
import sys
import tokenize
from pathlib import Path

BUDGET = 40_990
LOOK_AGAIN = 400
PARTS = ("manylora", "adapters", "benchmarks", "engine", "kernels", "memory", "registry", "server")
SKIPPED = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING}


def code_lines(path: Path) -> int:
    """Lines of a file that hold anything other than a comment or a docstring."""
    if path.suffix != ".py":
        stripped = (line.strip() for line in path.read_text().splitlines())
        return sum(bool(line) and not line.startswith(("//", "/*", "* ", "*/")) for line in stripped)
    lines: set[int] = set()
    statement_start = True
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type in SKIPPED or token.type == tokenize.ENDMARKER:
            statement_start = statement_start or token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
            continue
        if token.type == tokenize.STRING and statement_start:
            continue
        statement_start = False
        lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines)


def main() -> int:
    """Print the count of each part and the files worth a second look."""
    root = Path(__file__).resolve().parent.parent
    total = 0
    for part in PARTS:
        top = root / part
        found = sorted(path for pattern in ("*.py", "*.cpp", "*.h", "*.js") for path in top.rglob(pattern))
        files = [p for p in found if not (top / p.relative_to(top).parts[0]).is_symlink() and "vendor" not in p.parts]
        counts = {path: code_lines(path) for path in files}
        total += sum(counts.values())
        print(f"{part:12} {sum(counts.values()):6}")
        for path in files:
            if (length := len(path.read_text().splitlines())) > LOOK_AGAIN:
                print(f"    look again: {path.relative_to(root)} has {length} lines")
    print(f"{'total':12} {total:6} of {BUDGET}")
    return int(total > BUDGET)


if __name__ == "__main__":
    sys.exit(main())
