"""A server of the benchmark's own, and one that runs already."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shop_window import shop_window
from weft import demo
from weft.benchmarks.main import main


def test_a_server_is_started_given_adapters_loaded_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_REGISTRY__BLOB_URL", str(tmp_path / "of-a-real-server"))
    path = tmp_path / "r.json"
    status = main(
        "serve",
        [
            *("--model", str(demo.MODEL), "--adapter", str(demo.ADAPTERS / "pirate")),
            *("--set", "memory.gib=0.05", "--set", "memory.host_gib=0.05", "--set", "model.threads=1"),
            *("--requests", "6", "--concurrency", "3", "--output-tokens", "4", "--json", str(path)),
        ],
    )
    assert status == 0
    result = json.loads(path.read_text())
    assert result["adapters"] == {"base": 3, "pirate": 3}
    assert result["summary"]["completion_tokens"] == 24
    assert "key" not in result["options"]
    assert not (tmp_path / "of-a-real-server").exists()


def test_a_running_server_is_taken_as_it_is() -> None:
    with shop_window() as server:
        arguments = ["--url", server.url, "--models", "a", "--requests", "2", "--output-tokens", "2"]
        assert main("serve", arguments) == 0
        assert len(server.bodies) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "http://127.0.0.1:1/v1"], "--url needs --models"),
        (["--url", "http://127.0.0.1:1/v1", "--models", "a", "--model", "m"], "leave out --model"),
        (["--models", "a"], "give its --url"),
        (["--adapter", "a"], "--adapter needs --model"),
        (["--model", str(demo.MODEL), "--adapter", "nowhere"], "nowhere is no folder of an adapter"),
        (["--model", "m", "--adapter", "a/final", "--adapter", "b/final"], "must differ: got final, final"),
        (["--model", "m", "--popularity", "none"], "popularity"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main("serve", arguments) == 2
    assert message in capsys.readouterr().err


def test_a_server_that_does_not_start_is_told_with_its_own_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main("serve", ["--model", str(tmp_path), "--requests", "1"]) == 1
    assert "config.json" in capsys.readouterr().err
