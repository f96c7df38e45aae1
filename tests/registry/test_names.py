from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import InvalidRequestError
from weft.registry.names import check_alias, check_integer, check_name, check_text, is_name, storable


@pytest.mark.parametrize("name", ["a", "0", "a.b", "my-adapter_2.1", "x" * 63])
def test_a_good_name_is_returned(name: str) -> None:
    assert check_name(name, "name") == name


@pytest.mark.parametrize(
    "name",
    ["", "A", ".a", "a.", "-a", "a-", "a..b", "x" * 64, "a/b", "a b", "a\n", "é", "a\x00", "../etc", "a@b", 7, None],
)
def test_a_bad_name_is_refused_with_its_field(name: object) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_name(name, "name")  # type: ignore[arg-type]
    assert caught.value.param == "name"


@given(st.text(max_size=70))
def test_names_are_safe_as_a_path_part(text: str) -> None:
    if is_name(text):
        assert re.fullmatch(r"[a-z0-9._-]{1,63}", text)
        assert text not in (".", "..")
        assert ".." not in text


def test_an_alias_is_a_name_but_no_number() -> None:
    assert check_alias("v2") == "v2"
    with pytest.raises(InvalidRequestError):
        check_alias("2")
    with pytest.raises(InvalidRequestError):
        check_alias("sha256:ab")


@pytest.mark.parametrize("text", ["a\x00b", "\ud800", "x" * 11, 5])
def test_text_that_a_database_refuses_is_refused_first(text: object) -> None:
    with pytest.raises(InvalidRequestError):
        check_text(text, "description", 10)  # type: ignore[arg-type]


def test_text_of_any_script_passes() -> None:
    assert check_text("grüße 🧵", "description", 10) == "grüße 🧵"


@given(st.text(st.characters(codec=None), max_size=30))
def test_storable_text_always_passes_the_check(text: str) -> None:
    check_text(storable(text, 20), "request_id", 20)


@pytest.mark.parametrize("value", [-1, 1 << 63, True, 1.0, "1", None])
def test_an_integer_beyond_its_bounds_or_of_another_type_is_refused(value: object) -> None:
    with pytest.raises(InvalidRequestError):
        check_integer(value, "limit")


def test_the_largest_integer_passes() -> None:
    assert check_integer((1 << 63) - 1, "limit") == (1 << 63) - 1
