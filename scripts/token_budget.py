"""Count the Python tokens of the product, and the lines of its C++ and JavaScript; fail above a budget.

Tokens instead of lines: a line break, a longer name or a docstring costs nothing, and only less code is a saving.
Comments, docstrings, line ends and the commas before closing brackets, which the formatter adds, do not count; an
f-string counts as one token under every Python. Raising a budget is a commit of its own, with a reason.
"""

from __future__ import annotations

import io
import sys
import tokenize
from pathlib import Path

TOKEN_BUDGET = 370_000
LINE_BUDGETS = {"C++": 1_880, "JavaScript": 3_260}
LOOK_AGAIN = 400
PARTS = ("manylora", "adapters", "benchmarks", "engine", "kernels", "memory", "registry", "server")
LANGUAGES = {".cpp": "C++", ".h": "C++", ".js": "JavaScript"}
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER}
CLOSING = {")", "]", "}"}
STATEMENT_ENDS = {tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
FSTRING_START = getattr(
    tokenize, "FSTRING_START", None
)  # None before Python 3.12, where an f-string is one token
FSTRING_END = getattr(tokenize, "FSTRING_END", None)


def python_tokens(path: Path) -> int:
    """Tokens of a Python file without comments, docstrings and line ends."""
    count = depth = 0
    statement_start = True
    before = ""
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type in LAYOUT:
            continue
        if token.type in STATEMENT_ENDS:
            statement_start = True
            continue
        if token.type == tokenize.STRING and statement_start:
            continue
        statement_start = False
        if FSTRING_START is not None and token.type == FSTRING_START:
            depth += 1
            count += depth == 1
        elif FSTRING_END is not None and token.type == FSTRING_END:
            depth -= 1
        elif not depth:
            count += 1 - (before == "," and token.string in CLOSING)
        before = token.string
    return count


def code_lines(path: Path) -> int:
    """Lines of a C++ or JavaScript file that hold code."""
    stripped = (line.strip() for line in path.read_text().splitlines())
    return sum(bool(line) and not line.startswith(("//", "/*", "* ", "*/")) for line in stripped)


def files_of(top: Path) -> list[Path]:
    """Files of a part, without what its links lead to and what others wrote."""
    found = sorted(
        path for pattern in ("*.py", "*.cpp", "*.h", "*.js") for path in top.rglob(pattern)
    )
    return [
        path
        for path in found
        if not (top / path.relative_to(top).parts[0]).is_symlink() and "vendor" not in path.parts
    ]


def main() -> int:
    """Print the counts of each part and the files worth a second look."""
    root = Path(__file__).resolve().parent.parent
    total = 0
    lines = dict.fromkeys(LINE_BUDGETS, 0)
    for part in PARTS:
        files = files_of(root / part)
        tokens = sum(python_tokens(path) for path in files if path.suffix == ".py")
        total += tokens
        print(f"{part:12} {tokens:8,}")
        for path in files:
            if language := LANGUAGES.get(path.suffix):
                lines[language] += code_lines(path)
            if (length := len(path.read_text().splitlines())) > LOOK_AGAIN:
                print(f"    look again: {path.relative_to(root)} has {length} lines")
    print(f"{'tokens':12} {total:8,} of {TOKEN_BUDGET:,}")
    for language, count in lines.items():
        print(f"{language + ' lines':12} {count:8,} of {LINE_BUDGETS[language]:,}")
    return int(
        total > TOKEN_BUDGET
        or any(count > LINE_BUDGETS[language] for language, count in lines.items())
    )


if __name__ == "__main__":
    sys.exit(main())
