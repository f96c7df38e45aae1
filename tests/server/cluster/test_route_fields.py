from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manylora.server.cluster.route_fields import OPEN_TOKENS, PREFIX_BYTES, RouteFields, read_fields


@given(st.binary(max_size=200))
def test_any_bytes_are_read_without_an_error(body: bytes) -> None:
    fields = read_fields(body)
    assert fields.units(len(body)) >= 0


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'{"model": 5}',
        b'{"model": "\xff"}',
        b'{"user": "\\ud800"}',
        b'{"metadata":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
def test_what_the_replica_will_refuse_names_nothing(body: bytes) -> None:
    fields = read_fields(body)
    assert fields.model is None
    assert fields.sticky is None


@pytest.mark.parametrize(
    ("body", "sticky"),
    [
        ({"user": "u", "metadata": {"user_id": "m"}}, "u"),
        ({"metadata": {"user_id": "m"}}, "m"),
        ({"metadata": {"user_id": 5}}, None),
        ({"metadata": "text"}, None),
        ({"user": None}, None),
        ({}, None),
    ],
)
def test_the_user_is_found(body: dict[str, Any], sticky: str | None) -> None:
    assert read_fields(json.dumps(body).encode()).sticky == sticky


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "max_output_tokens"])
@pytest.mark.parametrize(
    ("given_tokens", "counted"),
    [
        (5, 5),
        (0, 0),
        (10**30, OPEN_TOKENS),
        (-1, OPEN_TOKENS),
        ("5", OPEN_TOKENS),
        (True, OPEN_TOKENS),
        (None, OPEN_TOKENS),
    ],
)
def test_work_is_predicted_from_the_length_asked_for(
    name: str, given_tokens: object, counted: int
) -> None:
    fields = read_fields(json.dumps({name: given_tokens}).encode())
    assert fields.units(400) == 100 + 2 * counted


def test_prompts_that_begin_alike_have_one_beginning_within_a_tenant() -> None:
    def beginning(tenant: str, prompt: str, **more: object) -> bytes | None:
        return read_fields(json.dumps({"prompt": prompt, **more}).encode()).beginning(tenant)

    long = "x" * PREFIX_BYTES
    first = beginning("ten_a", long + "a")
    assert first is not None
    assert first == beginning("ten_a", long + "b", model="m")
    assert first != beginning("ten_b", long + "a")
    assert first != beginning("ten_a", "y" + long)
    assert beginning("ten_a", "short") is None
    assert RouteFields().beginning("ten_a") is None
