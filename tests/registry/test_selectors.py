from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import NotFoundError
from weft.registry.names import Selector, parse_selector

DIGEST = "sha256:" + "a1" * 32


@pytest.mark.parametrize(
    ("text", "selector"),
    [
        ("support", Selector(tenant=None, name="support", alias="default")),
        ("support@3", Selector(tenant=None, name="support", version=3)),
        ("support@prod", Selector(tenant=None, name="support", alias="prod")),
        (f"support@{DIGEST}", Selector(tenant=None, name="support", digest=DIGEST)),
        ("acme/support", Selector(tenant="acme", name="support", alias="default")),
        ("acme/support@12", Selector(tenant="acme", name="support", version=12)),
    ],
)
def test_each_form_is_understood(text: str, selector: Selector) -> None:
    assert parse_selector(text) == selector


@pytest.mark.parametrize(
    "text",
    [
        "",
        "@",
        "support@",
        "support@0",
        "support@03",
        "support@-1",
        "support@9999999999",
        "support@1@2",
        "/support",
        "acme/",
        "a/b/c",
        "Support",
        "support@sha256:abc",
        f"support@{DIGEST.upper()}",
        "support@../x",
        "sup\x00port",
        "\ud800",
    ],
)
def test_a_malformed_selector_is_an_unknown_model(text: str) -> None:
    with pytest.raises(NotFoundError) as caught:
        parse_selector(text)
    assert caught.value.code == "model_not_found"
    caught.value.message.encode()


@given(st.text(max_size=40))
def test_any_text_is_a_selector_or_an_unknown_model(text: str) -> None:
    try:
        selector = parse_selector(text)
    except NotFoundError:
        return
    assert [selector.version, selector.alias, selector.digest].count(None) == 2
