"""The lint finds the habits that it is for, and only these."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "house_lint.py"


@pytest.fixture(scope="module")
def lint() -> Any:
    spec = importlib.util.spec_from_file_location("house_lint", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def lines(lint: Any, rule: str, source: str, path: str = "engine/example.py") -> list[int]:
    return sorted(line for line, _ in getattr(lint, rule)(lint.File.read(path, source)))


@pytest.mark.parametrize(
    "source",
    [
        "a, b = x, y",
        "self.a, b = 1, f()",
        "a, (b, c) = x, f()",
        "a = b, c = x, y",
        "a, b = x, g(b)",
    ],
)
def test_parallel_assignments_of_unrelated_values_are_found(lint: Any, source: str) -> None:
    assert lines(lint, "parallel_assignments", source) == [1]


@pytest.mark.parametrize(
    "source",
    [
        "a, b = b, a",
        "a, b = b, a + b",
        "old, self.value = self.value, new",
        "a[i], a[j] = a[j], a[i]",
        "a, b = f()",
        "a, *rest = *x, y",
        "pair = x, y",
        "for a, b in ((1, 2), (3, 4)): ...",
    ],
)
def test_exchanges_and_unpacking_are_not_parallel_assignments(lint: Any, source: str) -> None:
    assert lines(lint, "parallel_assignments", source) == []


def test_literals_are_found_that_are_spread_where_their_elements_could_stand(lint: Any) -> None:
    source = 'f(*("a", "b"))\nrun([*["a", b], c])\nf(*names)\nf(*(["a"] if b else []))\n'
    assert lines(lint, "spread_literals", source) == [1, 2]


def test_docstrings_of_all_kinds_are_read(lint: Any) -> None:
    source = '''"""What a module is."""
class A:
    """Whether a class is."""

    field: int
    """How many fields."""

    def method(self):
        """Of a method."""

LIMIT = 3
"""The same for a constant."""
OTHER = 3
"""Limit of whatever it is. What follows is a sentence."""
'''
    assert lines(lint, "question_docstrings", source) == [1, 3, 6]
    assert lines(lint, "hanging_docstrings", source) == [9, 12]


@pytest.mark.parametrize(
    "text",
    [
        "Rows of at most so many tokens.",
        "Wait for so long.",
        "Lines that end with so\n    many words.",
        "Slots are at most so far away.",
    ],
)
def test_a_number_without_a_name_is_found(lint: Any, text: str) -> None:
    assert lines(lint, "vague_numbers", f'"""{text}"""') == [1]


def test_a_comment_without_a_number_is_found(lint: Any) -> None:
    assert lines(lint, "vague_numbers", 'x = "# so many"\ny = 1  # at most so many\n') == [2]


@pytest.mark.parametrize(
    "text", ["Tokens so far.", "There are so many that none fits.", "Works so long as it is held."]
)
def test_usual_english_is_no_number(lint: Any, text: str) -> None:
    assert lines(lint, "vague_numbers", f'"""{text}"""') == []


def test_wide_dataclasses_are_found_but_for_those_that_are_named(lint: Any) -> None:
    fields = "".join(f"    f{index}: int\n" for index in range(lint.MOST_FIELDS))
    more = f"{fields}    last: int\n"
    assert lines(lint, "wide_dataclasses", f"@dataclass(slots=True)\nclass A:\n{more}") == [2]
    assert lines(lint, "wide_dataclasses", f"@dataclass\nclass A:\n{fields}") == []
    constant = f"@dataclass\nclass A:\n{fields}    last: ClassVar[int]\n"
    assert lines(lint, "wide_dataclasses", constant) == []
    assert lines(lint, "wide_dataclasses", f"class A(BaseModel):\n{more}") == []
    (named, *_) = lint.WIDE_DATACLASSES
    assert lines(lint, "wide_dataclasses", f"@dataclass\nclass {named}:\n{more}") == []


def test_wide_signatures_are_found_but_for_kernels_and_commands(lint: Any) -> None:
    eight = ", ".join(f"p{index}" for index in range(lint.MOST_PARAMETERS))
    wide = f"def f(self, {eight}, *, last): ...\n"
    assert lines(lint, "wide_signatures", f"def f(self, {eight}): ...\n{wide}") == [2]
    assert lines(lint, "wide_signatures", wide, "kernels/triton/x.py") == []
    assert lines(lint, "wide_signatures", wide, "manylora/cli/serve.py") == []


def test_a_count_above_its_budget_fails_and_names_the_places(
    lint: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    file = lint.File.read("engine/example.py", "x = 1\na, b = x, 2\n")
    rules = [lint.Rule("pairs", lint.parallel_assignments, budget) for budget in (1, 0)]
    assert not lint.report([file], rules[:1])
    assert "engine/example.py" not in capsys.readouterr().out
    assert lint.report([file], rules[1:])
    assert "1 of     0  pairs\n    engine/example.py:2: a, b = (x, 2)" in capsys.readouterr().out


def test_the_product_is_read_whole_and_its_links_once(lint: Any) -> None:
    paths = lint.product_files()
    assert {path.split("/")[0] for path in paths} == set(lint.PARTS)
    assert not [path for path in paths if path.startswith("manylora/engine/")]
