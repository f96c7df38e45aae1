"""Two servers under the same load, in turns."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from manylora.benchmarks.main import main
from shop_window import ShopWindow, shop_window


@pytest.fixture
def servers() -> Iterator[tuple[ShopWindow, ShopWindow]]:
    with shop_window() as ours, shop_window() as theirs:
        yield ours, theirs


def compare(
    servers: tuple[ShopWindow, ShopWindow], path: Path, *arguments: str
) -> tuple[int, dict[str, Any]]:
    ours, theirs = servers
    status = main(
        "compare",
        [
            *("--url", ours.url, "--key", "our-secret", "--models", "base,pirate"),
            *("--peer", theirs.url, "--peer-key", "their-secret", "--peer-name", "peer"),
            *(
                "--requests",
                "6",
                "--concurrency",
                "2",
                "--output-tokens",
                "3",
                "--repeats",
                "2",
                "--json",
                str(path),
            ),
            *arguments,
        ],
    )
    return status, json.loads(path.read_text()) if path.exists() else {}


def written(body: dict[str, Any]) -> str:
    return json.dumps(body, sort_keys=True)


def test_both_get_the_same_requests_under_their_own_names(
    servers: tuple[ShopWindow, ShopWindow],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        sys.modules["__main__"], "__spec__", None
    )  # as of a script, however the tests were started
    monkeypatch.setattr(
        sys,
        "argv",
        ["manylora", "bench", "compare", "--key", "our-secret", "--peer-key", "their-secret"],
    )
    status, result = compare(servers, tmp_path / "r.json", "--peer-models", "b,l0")
    assert status == 0
    assert result["command"] == "manylora bench compare --key KEY --peer-key KEY"
    ours, theirs = servers
    prompts = [tuple(body["prompt"]) for body in ours.bodies]
    assert len(set(prompts)) == len(prompts), "a prompt that comes again is in a prefix cache"
    assert len(ours.bodies) == len(theirs.bodies) == 3 * 6
    names = {"base": "b", "pirate": "l0"}
    translated = [{**body, "model": names[body["model"]]} for body in ours.bodies]
    assert sorted(translated, key=written) == sorted(theirs.bodies, key=written)
    assert ours.authorizations == {"Bearer our-secret"}
    assert theirs.authorizations == {"Bearer their-secret"}
    assert "secret" not in json.dumps(result)
    rates = {name: each["output tokens/s"]["repeats"] for name, each in result["figures"].items()}
    expected = [one / two for one, two in zip(rates["Manylora"], rates["peer"], strict=True)]
    assert result["ratios"]["output tokens/s"]["repeats"] == pytest.approx(expected, rel=1e-4)
    assert capsys.readouterr().out.splitlines()[-1].startswith('{"benchmark": "compare"')


def test_models_that_do_not_match_are_refused_with_the_numbers(
    servers: tuple[ShopWindow, ShopWindow], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _ = compare(servers, tmp_path / "r.json", "--peer-models", "b")
    assert status == 2
    assert "--peer-models names 1 models, Manylora has 2 (base, pirate)" in capsys.readouterr().err
    assert not servers[0].bodies


def test_a_server_that_answers_wrongly_is_named_before_anything_is_measured(
    servers: tuple[ShopWindow, ShopWindow], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    servers[1].fault = "short"
    status, result = compare(servers, tmp_path / "r.json", "--peer-models", "b,l0")
    assert status == 1
    assert (
        "peer does not answer as asked: usage says 2 tokens came, 3 were asked for"
        in capsys.readouterr().err
    )
    assert not result
