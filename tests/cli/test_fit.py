"""`manylora fit`: the plan for adapters on disk and for adapters to come, without a server."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from typer.testing import CliRunner

from fake_engine import DEMO_MODEL, demo_ready
from lora_files import config_bytes, q_and_v, tensor, weights_bytes
from manylora.adapters.lora.layout import adapter_pages
from manylora.cli import make_app
from manylora.config import GIB, Config, MemoryConfig, ModelConfig, Weights
from manylora.engine.build import build_engine
from manylora.server.adapters.offline_fit import planned_engine
from real_models import real_config

ADAPTERS = DEMO_MODEL.parent / "adapters"
CONFIG = Config(
    model=ModelConfig(path=str(DEMO_MODEL), device="cpu", dtype="float32", threads=1),
    memory=MemoryConfig(gib=0.05, host_gib=0.01),
)
SMALL = ("--device", "cpu", "--dtype", "float32", "--set", "memory.host_gib=0.01")


def run(*arguments: str, model: Path = DEMO_MODEL, **environ: str) -> Any:
    env = {"NO_COLOR": "1", "COLUMNS": "200", "FORCE_COLOR": None, **environ}
    return CliRunner().invoke(make_app(), ["fit", "--model", str(model), *arguments], env=env)


def answer(*arguments: str, status: int = 0, model: Path = DEMO_MODEL) -> Any:
    done = run(*arguments, *SMALL, "--json", model=model)
    assert done.exit_code == status, done.output
    return json.loads(done.output)


@pytest.mark.parametrize("weights", ["auto", "int8"])
def test_the_plan_is_the_engines_own(weights: Weights) -> None:
    config = replace(CONFIG, model=replace(CONFIG.model, weights=weights))
    planned = planned_engine(config)
    parts = build_engine(config)
    try:
        ready = parts.ready
        assert planned.memory == ready.memory
        assert planned.geometry == ready.geometry
        assert planned.max_model_len == ready.max_model_len
        assert planned.base.modules == ready.base.modules
    finally:
        parts.core.close()


def test_a_kv_cache_of_int8_leaves_more_tokens() -> None:
    wide, int8 = (
        answer("--rank", "8", "--memory-gib", "0.05", "--set", f"memory.kv_dtype={kv_dtype}")
        for kv_dtype in ("auto", "int8")
    )
    assert int8["kv_tokens_left"] > 3 * wide["kv_tokens_left"]  # of float32
    assert int8["pages"]["needed"] <= wide["pages"]["needed"]
    text = run(
        "--rank", "8", "--memory-gib", "0.05", *SMALL, "--set", "memory.kv_dtype=int8"
    ).output
    assert "on cpu in float32 with int8 KV cache, weights" in text


def test_adapters_on_disk_need_the_pages_that_the_layout_gives_them() -> None:
    folders = sorted(str(folder) for folder in ADAPTERS.iterdir() if folder.is_dir())
    body = answer(*folders, "--memory-gib", "0.05")
    assert [item["adapter"] for item in body["adapters"]] == folders
    assert body["pages"]["needed"] == sum(item["pages"] for item in body["adapters"])
    assert body["slots"]["needed"] == len(folders)
    ranks = {Path(item["adapter"]).name: item["rank"] for item in body["adapters"]}
    assert ranks == {"pirate": 4, "shout": 8, "french": 32, "json": 16, "haiku": 24}
    planned = planned_engine(CONFIG)
    q_and_v = {(layer, module): 4 for layer in range(planned.base.num_layers) for module in (0, 2)}
    pirate = next(item for item in body["adapters"] if item["adapter"].endswith("pirate"))
    assert pirate["pages"] == adapter_pages(q_and_v, planned.base, planned.geometry)


def test_adapters_of_mlx_are_measured_as_they_are(mlx_folder: Path) -> None:
    (item,) = answer(str(mlx_folder))["adapters"]
    assert item["rank"] == 6


def test_the_same_bytes_count_once(tmp_path: Path) -> None:
    shutil.copytree(ADAPTERS / "pirate", tmp_path / "copy")
    one, two = (
        answer(str(ADAPTERS / "pirate")),
        answer(str(ADAPTERS / "pirate"), str(tmp_path / "copy")),
    )
    for each in (
        "pages",
        "slots",
    ):  # what is left follows from the memory that is free, which others use as well
        assert two[each]["needed"] == one[each]["needed"] > 0


def test_the_answer_is_a_table_and_a_sentence() -> None:
    done = run(
        str(ADAPTERS / "pirate"), "--rank", "16", "--count", "10", "--memory-gib", "0.05", *SMALL
    )
    assert done.exit_code == 0, done.output
    header, pirate, planned, blank, *rest = done.output.splitlines()
    assert header.split() == ["ADAPTER", "RANK", "TARGETS", "COUNT", "PAGES", "SIZE", "WASTE"]
    assert pirate.split()[:4] == [str(ADAPTERS / "pirate"), "4", "q,v", "1"]
    assert planned.split()[2:5] == ["16", "q,k,v,o,gate,up,down", "10"]
    assert re.search(r"\d+\.\d%$", planned)
    assert blank == ""
    assert "All fit at once: 11 adapters need " in rest[-1]
    assert "requests of 1,024 tokens" in rest[-1]
    about = next(line for line in rest if ", weights " in line)
    rounded = run("--rank", "16", "--memory-gib", "0.05", "--weights", "int8", *SMALL).output
    assert " with int8 weights, weights " in rounded
    assert about.rpartition(", ")[2] not in rounded


@pytest.mark.parametrize(
    ("arguments", "least"),
    [
        (
            (
                "--rank",
                "8",
                "--count",
                "300",
                "--targets",
                "k",
                "--memory-gib",
                "0.1",
                "--set",
                "adapter.slots=256",
            ),
            "adapter.slots=300",
        ),
        (("--rank", "64", "--count", "257", "--memory-gib", "0.02"), "--memory-gib"),
    ],
)
def test_what_does_not_fit_exits_with_1_and_fits_with_the_advice(
    arguments: tuple[str, ...], least: str
) -> None:
    body = answer(*arguments, status=1)
    assert not body["fits"]
    assert least in body["advice"]
    advised = body["advice"].partition(": ")[2].split()
    assert answer(*arguments, *advised)["fits"]


def test_the_advised_memory_is_the_smallest() -> None:
    arguments = ("--rank", "16", "--count", "100")
    body = answer(*arguments, "--memory-gib", "0.02", status=1)
    least = float(body["advice"].partition("--memory-gib ")[2])
    assert answer(*arguments, "--memory-gib", str(least))["fits"]
    assert not answer(*arguments, "--memory-gib", str(round(least - 0.001, 3)), status=1)["fits"]
    done = run(*arguments, "--memory-gib", "0.02", *SMALL)
    assert done.exit_code == 1
    assert "take turns" in done.output
    assert body["advice"] in done.output


def test_where_no_memory_would_do_the_reason_is_given() -> None:
    body = answer(
        "--rank", "64", "--count", "250", "--memory-gib", "0.02", "--free-gib", "0.5", status=1
    )
    assert "No setting makes room" in body["advice"]
    assert "0.50 GiB are free" in body["advice"]


def test_another_machine_is_planned_from_a_config_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(real_config("Llama-3-8B")))
    asked: dict[str, Any] = {}

    def download(repo_id: str, **patterns: object) -> str:
        asked.update(patterns, repo_id=repo_id)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    done = run(
        *("--rank", "16", "--count", "100", "--device", "cuda", "--free-gib", "80", "--json"),
        model=Path("some-org/Llama-3-8B"),
    )
    assert done.exit_code == 0, done.output
    assert asked["repo_id"] == "some-org/Llama-3-8B"
    assert asked["allow_patterns"] == ["config.json", "recipe.yaml", "model.safetensors.index.json"]
    body = json.loads(done.output)
    (planned,) = body["adapters"]
    assert planned["pages"] in (40, 41)
    assert planned["waste"] <= 0.05
    weights = 2 * (
        128256 * 4096 * 2
        + 32 * (4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14336 + 2 * 4096)
        + 4096
    )
    reserved = planned_engine(
        Config(model=ModelConfig(path=str(tmp_path), device="cuda")), 80
    ).memory.reserved.total
    tables = (
        4 * body["slots"]["total"] * 32 * 7 * (2 * 64 // 8 + 2)
    )  # int32 for each row group, and rank and scaling
    pages = (80 * GIB - weights - reserved - tables) // (2 << 20) - 1
    assert 0.9999 * pages < body["pages"]["total"] <= pages
    text = run(*("--rank", "16", "--device", "cuda", "--free-gib", "80"), model=tmp_path).output
    assert re.search(
        r"^reserved 2\.\d\d GiB \(1\.09 GiB for CUDA graphs, .*2,048 tokens\)$", text, re.MULTILINE
    )
    assert body["kv_tokens_left"] == 16 * (body["pages"]["total"] - 100 * planned["pages"])


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((), "--rank"),
        (("--rank", "0"), "1 to 64, got 0.\n"),
        (("--rank", "65"), "--max-rank"),
        (("--rank", "257"), "1 to 64, got 257.\n"),
        (("--rank", "8", "--count", "0"), "--count must be 1 to 1048576"),
        (("--rank", "8", "--count", "9" * 400), "--count must be 1 to 1048576"),
        (("--rank", "8", "--targets", "lm_head"), "--targets"),
        (("--rank", "8", "--targets", ""), "--targets"),
        (("--rank", "8", "--max-rank", "12"), "adapter.max_rank"),
        (("--rank", "8", "--memory-gib", "0"), "memory.gib"),
        (("--rank", "8", "--free-gib", "-1"), "--free-gib"),
        (("--rank", "8", "--free-gib", "nan"), "--free-gib"),
        (("--rank", "8", "--free-gib", "0.0001"), "free"),
        (("--rank", "8", "--set", "memory.gb=1"), "memory.gib"),
        (
            ("--rank", "8", "--weights", "int3"),
            "model.weights: must be 'auto', 'bf16', 'int8' or 'int4'",
        ),
        (("/nowhere",), "no folder /nowhere"),
        (("/",), "adapter_config.json"),
    ],
)
def test_wrong_use_exits_with_2_and_the_reason(arguments: tuple[str, ...], reason: str) -> None:
    done = run(*arguments, "--device", "cpu")
    assert (done.exit_code, reason in done.output) == (2, True), done.output


def test_an_adapter_that_cannot_be_served_exits_with_2(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_bytes(config_bytes())
    (tmp_path / "adapter_model.safetensors").write_bytes(b"PK\x03\x04 not weights")
    done = run(str(tmp_path))
    assert (done.exit_code, "weights." in done.output) == (2, True), done.output
    refused = run(str(ADAPTERS / "french"), "--max-rank", "16")
    assert (refused.exit_code, "adapter.max_rank" in refused.output) == (2, True), refused.output


def test_all_that_is_wrong_with_an_adapter_is_told_as_validate_tells_it(tmp_path: Path) -> None:
    tensors = {
        **q_and_v(demo_ready().base),
        "evil": tensor((8, 8)),
        "base_model.model.lm_head.weight": tensor((8, 8)),
    }
    (tmp_path / "adapter_config.json").write_bytes(config_bytes(use_dora=True, fan_in_fan_out=True))
    (tmp_path / "adapter_model.safetensors").write_bytes(weights_bytes(tensors))
    arguments = ["adapter", "validate", str(tmp_path), "--model", str(DEMO_MODEL)]
    for options in ([], ["--json"]):
        validated = CliRunner().invoke(
            make_app(), [*arguments, *options], env={"NO_COLOR": "1", "COLUMNS": "200"}
        )
        found = run(str(tmp_path), *options)
        assert (found.exit_code, found.stdout, found.stderr) == (
            2,
            validated.stdout,
            validated.stderr,
        )
    assert found.stderr.count("Hint: ") == 4
