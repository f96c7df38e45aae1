"""`manylora serve` whole, with the real engine and the demo model."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants

from idleness import wait_until
from manylora.config import environment
from manylora.engine.model.spec import resolve_model
from manylora.engine.model.weight_files import weight_files
from manylora.errors import ConfigError
from manylora.server.serve import load_tokenizer
from manylora_server import DEMO_MODEL, engines, manylora_server

pytestmark = pytest.mark.slow


def test_a_start_names_the_base_model_and_a_killed_engine_comes_back(tmp_path: Path) -> None:
    with manylora_server(tmp_path, "--memory-gib", "0.25", "--set", "model.threads=1") as server:
        assert (
            'manylora: ask for the base model with "model": "manylora-demo"'
            in server.log.read_text().splitlines()
        )
        engines(server)[0].kill()
        wait_until(lambda: server.admin.get("/ready").status_code == 503)
        refused = server.tenant("acme").post(
            "/v1/completions", json={"model": "manylora-demo", "prompt": "x"}
        )
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        server.wait_ready()
        assert server.ask("acme", "manylora-demo", "When are you open?")["choices"]


def test_tokenizer_settings_include_the_template_of_its_own_file(tmp_path: Path) -> None:
    shutil.copy(DEMO_MODEL / "tokenizer.json", tmp_path)
    assert load_tokenizer(str(tmp_path)).settings == {}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert load_tokenizer(str(tmp_path)).settings == {
        "eos_token": "</s>",
        "chat_template": "{{ messages }}",
    }


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model's folder in the cache of a hub that is out of reach. It lists the demo model's files and two more."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    commit, cached = "0123456789" * 4, tmp_path / "models--org--model"
    folder = cached / "snapshots" / commit
    for made in (cached / "refs", cached / "trees", folder):
        made.mkdir(parents=True)
    (cached / "refs" / "main").write_text(commit)
    names = [*(path.name for path in DEMO_MODEL.iterdir()), "README.md", ".gitattributes"]
    listed = {
        "format_version": 1,
        "files": {name: {"size": 1, "blob_id": "0" * 40} for name in names},
    }
    (cached / "trees" / f"{commit}.json").write_text(json.dumps(listed))
    return folder


def test_the_tokenizer_of_a_hub_model_is_found_where_the_engine_left_other_files_out(
    snapshot: Path,
) -> None:
    shutil.copytree(DEMO_MODEL, snapshot, dirs_exist_ok=True)
    tokenizer = load_tokenizer("org/model")
    assert tokenizer.encode("open")
    assert tokenizer.settings == json.loads((DEMO_MODEL / "tokenizer_config.json").read_text())


@pytest.mark.parametrize("is_listed", [True, False], ids=["listed", "older hub client"])
def test_a_start_that_failed_after_the_config_leaves_no_model_that_is_taken_for_whole(
    snapshot: Path, is_listed: bool
) -> None:
    shutil.copy(DEMO_MODEL / "config.json", snapshot)
    if not is_listed:
        shutil.rmtree(snapshot.parents[1] / "trees")
    assert resolve_model("org/model", files=("config.json",)) == snapshot
    with pytest.raises(ConfigError, match=r"with network access|start once with access to the hub"):
        weight_files(resolve_model("org/model"))


START = """
import json, subprocess, sys
from pathlib import Path
from manylora.config import environment
from manylora.errors import ConfigError
from manylora.server.serve import serve
from manylora.server.settings import load_config

def no_process(*_, **__):
    raise RuntimeError("a process was started")

subprocess.Popen = no_process
for settings in json.loads(sys.argv[1]):
    config = load_config(settings, {})
    try:
        serve(config, print)
    except ConfigError as error:
        print(json.dumps([error.param, error.message, "torch" in sys.modules, config.server.data_dir.exists()]))
"""
WRONG = [
    ("model", "path", "./no/such/folder", "no folder './no/such/folder'"),
    ("model", "max_model_len", 4096, "at most the model's 1024 positions, got 4096"),
    ("model", "device", "cuda", "no CUDA device"),
    ("model", "tool_format", "hermez", "must be one of gemma4, harmony, hermes, "),
    ("memory", "gib", 4096, "are free"),
    ("memory", "gib", 1e-6, "are the least"),
]
"""Section, name and value of a setting, and what is told about it."""


def test_a_wrong_setting_is_told_before_torch_is_loaded_and_anything_is_written(
    tmp_path: Path,
) -> None:
    starts = []
    for section, name, value, _ in WRONG:
        settings: dict[str, dict[str, object]] = {
            "model": {"path": str(DEMO_MODEL), "device": "cpu"},
            "server": {"port": 0, "data_dir": str(tmp_path / "data")},
        }
        settings.setdefault(section, {})[name] = value
        starts.append(settings)
    command = [sys.executable, "-P", "-c", START, json.dumps(starts)]
    hidden = {**environment(), "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(command, env=hidden, capture_output=True, text=True, timeout=60)
    answers = [json.loads(line) for line in ended.stdout.splitlines()]
    assert len(answers) == len(WRONG), ended.stderr
    for (section, name, _, told), (param, message, has_torch, has_data) in zip(
        WRONG, answers, strict=True
    ):
        assert param == f"{section}.{name}"
        assert told in message
        assert (has_torch, has_data) == (False, False), param
