"""The verbs of `scripts/gpu`, on toy sizes and a CPU, and what is made of their figures."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from manylora.benchmarks.engine.kernels import KernelBench, Work
from manylora.benchmarks.gpu import commands, kernels, step
from manylora.benchmarks.gpu.case_log import DONE, FAILED
from manylora.benchmarks.gpu.setup import Setup
from manylora.benchmarks.main import main
from manylora.errors import EngineError
from manylora.kernels.triton import plans

pytestmark = pytest.mark.slow
CPU = torch.device("cpu")
SERVER_PACKAGES = (
    *(
        "fastapi",
        "uvicorn",
        "zmq",
        "msgspec",
        "pydantic_settings",
        "sqlalchemy",
        "structlog",
        "prometheus_client",
    ),
    *("llguidance", "boto3", "alembic"),
)


@pytest.fixture
def verb(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Run a verb on toy sizes; returns what its file has."""

    def run(name: str, *more: str, status: int | None = None) -> dict[str, Any]:
        found = main("gpu", [name, "--out", str(tmp_path), "--tiny", "--commit", "abc", *more])
        assert found in ((DONE, FAILED) if status is None else (status,))
        path = tmp_path / f"{name}{'-eager' if '--eager' in more else ''}.json"
        content: dict[str, Any] = json.loads(path.read_text())
        return content

    return run


@pytest.fixture
def tiny(tmp_path: Path) -> Setup:
    return Setup(device=CPU, out=tmp_path, is_tiny=True)


def test_operations_are_timed_beside_their_floors_and_goals(
    verb: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    found = verb("kernels", "--only", r"32 rows, context|LoRA|greedy|norm|prompt|constants")
    assert (found["gpu"], found["commit"]) == (None, "abc")
    assert found["versions"]["torch"] == torch.__version__
    assert found["machine"]["bytes_per_s"] > 0
    cases = found["cases"]
    assert not [name for name, case in cases.items() if "error" in case]
    assert all(case["measured"] > 0 for case in cases.values())
    assert all(
        case["floor"] > 0 for name, case in cases.items() if not name.startswith("constants")
    )
    many, one = cases["LoRA, 32 rows, 32 of rank 16"], cases["LoRA, 32 rows, 1 of rank 16"]
    assert [part["name"] for part in many["parts"]] == [
        f"LoRA {site}" for site in ("qkv", "o", "gate_up", "down")
    ]
    assert many["goal"] == pytest.approx(1.4 * many["floor"], rel=1e-4)
    assert one["goal"] == pytest.approx(4 * 10)
    assert "goal" not in cases["LoRA, 32 rows, 8 of rank 8"], "its ranks add up to 64"
    assert cases["LoRA, 32 rows, 8 of rank 8"]["ok"], "a call gives the same bits twice"
    mixed = cases["LoRA, mixed ranks as one rank"]
    assert mixed["goal"] == pytest.approx(1.15 * mixed["even"], rel=1e-4)
    small = {part["name"] for part in cases["norm and SiLU, 32 rows"]["parts"]}
    assert small == {"SiLU and product", "add and norm"}
    assert {"greedy sampling, 32 rows", "attention, prompt of 512 after 0"} < set(cases)
    assert cases["constants of LoRA"]["chosen"] == {}, "no launcher of a CPU asks for constants"
    assert json.loads((tmp_path / "plans.json").read_text()) == {"cpu": {}}


def test_a_site_that_misses_its_goal_or_changes_its_bits_is_told(
    verb: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, grows = torch.zeros(3), iter(range(100))

    def lora(_bench: KernelBench, _ranks: tuple[int, ...], _rows: int) -> list[Work]:
        return [
            Work(name, run, 1e6, out=out) for name, run in (("steady", out.add_), ("moody", moody))
        ]

    def moody(_: int) -> torch.Tensor:
        return out.add_(next(grows))

    monkeypatch.setattr(KernelBench, "lora", lora)
    monkeypatch.setattr(kernels, "call_s", lambda *_: 1e-9)
    only = ("--only", "LoRA, 32 rows, 32 of rank 16")
    case = verb("kernels", *only, status=FAILED)["cases"]["LoRA, 32 rows, 32 of rank 16"]
    assert case["measured"] < case["goal"]
    assert not case["ok"]


def test_steps_are_timed_beside_their_floors_and_the_base(
    verb: Callable[..., dict[str, Any]],
) -> None:
    cases = verb("step", "--only", "32 rows|512")["cases"]
    assert not [name for name, case in cases.items() if "error" in case]
    base, single, many = (cases[f"decode, 32 rows, {count} adapters"] for count in (0, 1, 32))
    assert base["goal"] == pytest.approx(1.25 * base["floor"], rel=1e-4)
    assert many["floor"] > single["floor"] > base["floor"]
    assert min(single["goal"], many["goal"], cases["prompt of 512, 1 adapters"]["goal"]) > 0
    assert base["compiles"] == {}
    assert base["launches"] == 0, "a CPU gets no kernels"
    assert list(verb("step", "--eager", "--only", "1 rows, 0")["cases"]) == [
        "decode, 1 rows, 0 adapters"
    ]


def test_steps_that_could_not_be_captured_are_not_timed_as_graphs(tmp_path: Path) -> None:
    graphs, eager = (
        Setup(device=CPU, out=tmp_path, is_tiny=True, is_eager=each) for each in (False, True)
    )
    with graphs.stack, eager.stack:
        runners: list[Any] = [setup.engine.core._runner for setup in (graphs, eager)]
        for runner in runners:
            runner.programs = SimpleNamespace(num_recorded=0)
        error = r"no step could be captured as a CUDA graph.* --eager needs none"
        (case, *_) = step.cases(graphs).values()
        with pytest.raises(EngineError, match=error):
            case()
        step.check_captures(eager)
        for runner in runners:
            runner.programs = None
        for setup in (graphs, eager):
            step.check_captures(setup)
            with setup.engine.decoding(1, 2, []) as seconds:
                assert seconds > 0


def test_the_weights_of_the_engine_are_random_and_its_norms_ones(tiny: Setup) -> None:
    with tiny.stack:
        decoder = tiny.engine.core._runner.decoder
        assert all(
            torch.equal(norm, torch.ones(64, dtype=torch.bfloat16)) for norm in decoder._next_norms
        )
        assert float(decoder._embedding.float().std()) == pytest.approx(0.02, rel=0.05)
        refs = tiny.adapters((8, 16), 3)
        assert [ref.config.rank for ref in refs] == [8, 16, 8]
        assert len({ref.digest for ref in refs}) == 3


def test_copies_and_scattered_pages_are_timed(verb: Callable[..., dict[str, Any]]) -> None:
    cases = verb("memory")["cases"]
    assert not [name for name, case in cases.items() if "error" in case]
    copies = cases["copies of 256 KiB"]
    assert copies["goal"] == pytest.approx(copies["floor"] / 0.85, rel=1e-4)
    assert list(cases["attention over scattered pages, tiny"]["us_by_gib"]) == ["0", "8", "32"], (
        "there are 64 MiB"
    )


def test_steps_with_swaps_are_compared_with_steps_without(
    verb: Callable[..., dict[str, Any]],
) -> None:
    (case,) = verb("serve")["cases"].values()
    assert case["goal"] == pytest.approx(1.05 * case["quiet"]["step_ms"]["p99"], rel=1e-4)
    assert case["measured"] == case["swaps"]["step_ms"]["p99"]
    assert case["swaps"]["tokens_per_s"] > 0
    assert case["swaps"]["loads"] > step.NUM_RESIDENT, "adapters came and went"
    assert case["quiet"]["steps"] >= step.LEAST_STEPS


def test_tools_run_the_tests_or_are_told_to_be_missing(
    verb: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert {case["absent"] for case in verb("sanitize")["cases"].values()} == {
        "compute-sanitizer is not on PATH"
    }
    (tmp_path / "sanitize.json").unlink()
    tool = tmp_path / "compute-sanitizer"
    tool.write_text('#!/bin/sh\necho "$*"\n[ "$8" != racecheck ]\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = verb("sanitize", status=FAILED)["cases"]
    assert "racecheck ended with status 1" in found["racecheck"]["error"]
    told = found["memcheck"]["note"]
    assert "--tool memcheck env PYTORCH_NO_CUDA_MEMORY_CACHING=1 " in told
    assert f"-m gpu tests/kernels -k {commands.SANITIZED['memcheck']}" in told


def test_a_profile_is_a_trace_beside_what_a_step_costs(
    verb: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    cases = verb("profile")["cases"]
    assert not [name for name, case in cases.items() if "error" in case]
    for count in (0, 32):
        trace = json.loads(gzip.decompress((tmp_path / f"trace-{count}.json.gz").read_bytes()))
        assert "aten::embedding" in {event.get("name") for event in trace["traceEvents"]}
    assert cases["decode, 32 rows, 32 adapters"]["measured"] > 0


def is_running(process: int) -> bool:
    stat = Path(f"/proc/{process}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_program_that_takes_too_long_is_stopped(tmp_path: Path) -> None:
    hasty = Setup(device=CPU, out=tmp_path, is_tiny=True, seconds=0.2)
    with pytest.raises(
        EngineError, match=r"nap was stopped after 0 s; .*nap\.log has what it printed"
    ):
        commands.run(hasty, "nap", ["sh", "-c", "sleep 600 & echo $!; wait"])
    child = int((tmp_path / "nap.log").read_text())
    for _ in range(100):  # the kernel may take a moment
        if not is_running(child):
            break
        time.sleep(0.1)
    assert not is_running(child)


def test_the_best_constants_are_found_one_after_the_other(
    verb: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked() -> dict[str, int]:
        return plans.plan("items", BLOCK_N=64, num_stages=2, SPLIT=1)

    def attention(*_: object) -> list[Work]:
        return [
            Work("attention", lambda _: torch.tensor([5.0 if asked()["SPLIT"] == 1 else 6.0]), 1.0)
        ]

    def seconds(_run: object, _device: object) -> float:
        found = asked()
        if found["num_stages"] == 5:
            raise RuntimeError("out of resource: shared memory")
        return 2.0 + (found["BLOCK_N"] - 32) / 64 - found["num_stages"] / 10

    monkeypatch.setattr(KernelBench, "attention", attention)
    monkeypatch.setattr(kernels, "call_s", seconds)
    found = verb("kernels", "--only", "constants of decode", status=DONE)["cases"][
        "constants of decode attention"
    ]
    best = {"BLOCK_N": 16, "num_stages": 4, "SPLIT": 1}
    assert found["chosen"] == {"items": best}
    assert found["measured"] == pytest.approx(2.3e6)
    assert found["tried"][f"items {best}"] == pytest.approx(1.35e6)
    too_large, wrong = (f"items {best | other}" for other in ({"num_stages": 5}, {"SPLIT": 4}))
    assert found["tried"][too_large] == "RuntimeError: out of resource: shared memory"
    assert found["tried"][wrong] == "EngineError: the result differs"
    assert json.loads((tmp_path / "plans.json").read_text()) == {"cpu": {"items": best}}


def test_without_a_gpu_it_is_said_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main("gpu", ["step", "--out", str(tmp_path)]) == 2
    assert "sees no CUDA device. Run it where there is one" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_the_script_finds_manylora_and_hands_its_options_on(tmp_path: Path) -> None:
    script = commands.ROOT / "scripts" / "gpu"
    result = subprocess.run(
        [str(script), "sanitize", "--out", str(tmp_path), "--tiny", "--only", "memcheck"],
        env={"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("memcheck ")


def test_the_script_names_the_packages_that_are_missing(tmp_path: Path) -> None:
    (tmp_path / "python3").write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    (tmp_path / "python3").chmod(0o755)
    result = subprocess.run(
        [str(commands.ROOT / "scripts" / "gpu"), "first", "--out", str(tmp_path)],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert result.returncode == 2
    assert (
        "has no torch, numpy, safetensors, tokenizers, transformers, rich: install them"
        in result.stderr
    )


def test_verbs_need_no_package_of_the_server_s(tmp_path: Path) -> None:
    """A rented GPU comes with torch, Triton, transformers and PEFT, and perhaps without a network."""
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys; sys.modules.update(dict.fromkeys({SERVER_PACKAGES}))"
    )
    program = [
        "env",
        f"PYTHONPATH={tmp_path}",
        sys.executable,
        "-P",
        "-m",
        "manylora.benchmarks.main",
        "gpu",
    ]
    for verb, only in (
        ("check", "tests"),
        ("agree", "demo"),
        ("step", "decode, 1 rows, 1 adapters"),
    ):
        command = [*program, verb, "--tiny", "--out", str(tmp_path), "--only", only]
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        cases = json.loads((tmp_path / f"{verb}.json").read_text())["cases"]
        assert not [case for case in cases.values() if "error" in case], (
            result.stdout + result.stderr
        )
        assert len(cases) == 1
    assert " deselected in " in (tmp_path / "tests.log").read_text()
