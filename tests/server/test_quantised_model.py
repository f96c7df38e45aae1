"""`manylora serve` on quantised models: a GGUF file with adapters and grammars, one that adapters do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Type

from gguf_writer import write_gguf
from manylora.user_cache import cache_folder
from manylora_server import DEMO_ADAPTERS, DEMO_MODEL, expected_answers, manylora_server
from quantised_cases import CASES
from quantised_models import make_quantised

pytestmark = pytest.mark.slow
QUESTION = "When are you open?"


def test_a_gguf_file_serves_adapters_and_grammars_as_its_model_does(tmp_path: Path) -> None:
    write_gguf(DEMO_MODEL, tmp_path / "demo.gguf", {"": Type.BF16})
    (tmp_path / "cache" / "manylora").mkdir(parents=True)
    (tmp_path / "cache" / "manylora" / "kernels").symlink_to(
        cache_folder("kernels")
    )  # compiled once for all tests
    cache: dict[str, Any] = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    small = ("--memory-gib", "0.25", "--dtype", "float32", "--set", "model.threads=1")
    with manylora_server(
        tmp_path / "served", *small, model=tmp_path / "demo.gguf", **cache
    ) as server:
        client = server.publish("acme", "pirate")
        asked = [
            server.ask("acme", name, QUESTION)["choices"][0]["message"]
            for name in ("demo.gguf", "pirate")
        ]
        body = {
            "model": "demo.gguf",
            "prompt": "x",
            "structured_outputs": {"choice": ["yes", "no"]},
        }
        held = client.post("/v1/completions", json=body)
        assert held.json()["choices"][0]["text"] in ("yes", "no"), held.text
    expected = next(
        each for each in expected_answers()["questions"] if each["question"] == QUESTION
    )["answers"]
    assert [message["content"] for message in asked] == [expected["base"], expected["pirate"]]


def test_an_upload_for_a_checkpoint_with_scaled_inputs_is_refused_unless_the_setting_says_otherwise(
    tmp_path: Path,
) -> None:
    model = make_quantised(DEMO_MODEL, tmp_path, CASES["awq"].config, CASES["awq"].encode).stored
    small = {"memory.gib": 0.25, "model.threads": 1}
    with manylora_server(tmp_path / "one", model=model, settings=small) as server:
        refused = server.upload(server.tenant("acme"), "pirate", DEMO_ADAPTERS / "pirate")
        assert (refused.status_code, refused.json()["error"]["code"]) == (
            422,
            "config.base_folds_scale",
        )
        assert "model.adapters_trained_on_quantised" in refused.text
        assert server.ask("acme", "stored", QUESTION)["choices"]
    trained = {**small, "model.adapters_trained_on_quantised": "true"}
    with manylora_server(tmp_path / "two", model=model, settings=trained) as server:
        server.publish("acme", "pirate")
        assert server.ask("acme", "pirate", QUESTION)["choices"]
