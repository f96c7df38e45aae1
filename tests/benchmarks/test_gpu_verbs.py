"""The verbs of `scripts/gpu`, on toy sizes and a CPU, and what is made of their figures."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weft import demo
from weft.benchmarks.engine.kernels import KernelBench, Work
from weft.benchmarks.gpu import commands, kernels, serve, step
from weft.benchmarks.gpu.case_log import DONE, FAILED
from weft.benchmarks.gpu.machine import Setup, mode_settings
from weft.benchmarks.main import main
from weft.errors import EngineError
from weft.kernels.triton import plans

pytestmark = pytest.mark.slow
CPU = torch.device("cpu")


@pytest.fixture
def verb(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Run a verb on toy sizes; returns what its file has."""

    def run(name: str, *more: str, status: int | None = None) -> dict[str, Any]:
        found = main("gpu", [name, "--out", str(tmp_path), "--device", "cpu", "--tiny", "--commit", "abc", *more])
        assert found in ((DONE, FAILED) if status is None else (status,))
        content: dict[str, Any] = json.loads((tmp_path / f"{name}.json").read_text())
        return content

    return run


@pytest.fixture
def tiny(tmp_path: Path) -> Setup:
    return Setup(device=CPU, out=tmp_path, is_tiny=True)


def test_operations_are_timed_beside_their_floors_and_goals(verb: Callable[..., dict[str, Any]]) -> None:
    only = r"32 rows, context|LoRA qkv|greedy|norms|prompt|constants"
    found = verb("kernels", "--only", only)
    assert (found["gpu"]["name"], found["commit"]) == ("cpu", "abc")
    assert found["versions"]["torch"] == torch.__version__
    assert found["gigabytes_per_s"] > 0
    cases = found["cases"]
    assert not [name for name, case in cases.items() if "error" in case]
    measured = {name: case for name, case in cases.items() if "absent" not in case}
    assert all(case["measured"] > 0 and case["floor"] > 0 for case in measured.values())
    many, one = cases["LoRA qkv, 32 rows, 32 of rank 16"], cases["LoRA qkv, 32 rows, 1 of rank 16"]
    assert many["goal"] == pytest.approx(1.4 * many["floor"], rel=1e-4)
    assert one["goal"] == pytest.approx(10)
    assert "goal" not in cases["LoRA qkv, 32 rows, 8 of rank 8"], "its ranks add up to 64"
    assert many["ok"], "a call gives the same bits twice"
    mixed = cases["LoRA qkv, mixed ranks as one rank"]
    assert mixed["goal"] == pytest.approx(1.15 * mixed["even"], rel=1e-4)
    assert {"rope", "SiLU and product", "add and norm"} & set(cases["norms, SiLU and rope, 32 rows"]["parts"])
    assert {"greedy sampling, 32 rows", "attention, prompt of 512 after 0"} < set(measured)
    assert "no launcher asks for the plan" in cases["constants of items"]["absent"]


def test_steps_are_timed_and_what_a_graph_needs_is_told(verb: Callable[..., dict[str, Any]]) -> None:
    cases = verb("step", "--only", "eager|32 rows")["cases"]
    assert not [name for name, case in cases.items() if "error" in case]
    base, single = (cases[f"decode, 32 rows, {count} adapters, eager"] for count in (0, 1))
    assert base["goal"] == pytest.approx(1.25 * base["floor"], rel=1e-4)
    assert single["goal"] == pytest.approx(1.08 * base["measured"], rel=1e-4)
    assert single["floor"] > base["floor"]
    assert cases["decode, 32 rows, 8 adapters, eager"].get("goal") is None
    prompts = [cases[f"prompt of 512, {count} adapters, eager"] for count in (0, 1)]
    assert prompts[1]["goal"] == pytest.approx(1.12 * prompts[0]["measured"], rel=1e-4)
    graph = cases["decode, 32 rows, 0 adapters, graph"]
    assert mode_settings("graph") or "captures no graphs" in graph["absent"]


def test_an_engine_that_cannot_capture_its_steps_is_not_timed_as_graphs(
    tiny: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = SimpleNamespace(_programs=SimpleNamespace(num_recorded=0))
    parts = SimpleNamespace(ready=None)
    opened: Any = SimpleNamespace(core=SimpleNamespace(_runner=runner), parts=parts, blob_dir=None)
    monkeypatch.setattr(step, "random_engine", lambda *_: nullcontext(opened))
    monkeypatch.setattr(step, "store_adapters", lambda *_: [])
    engines = step.Engines(tiny)
    for _ in range(2):
        with pytest.raises(EngineError, match="no step could be captured"):
            engines.open("graph")
    assert engines.open("eager")[0] is opened
    runner._programs.num_recorded = 3
    assert engines.open("graph")[0] is opened


def test_waits_are_told_where_the_runner_has_them(tiny: Setup) -> None:
    engines = step.Engines(tiny)
    engine, _ = engines.open("eager")
    runner: Any = engine.core._runner
    if not hasattr(runner, "collect"):
        execute = runner.execute
        runner.collect = lambda launched: launched
        runner.execute = lambda *plan: runner.collect(execute(*plan))
    with step.decoding(engine, [], 2, 8, tiny.vocab_size) as waits:
        engine.pump()
        engine.pump()
        assert len(waits) == 2
    engine.pump()
    assert len(waits) == 2
    engines.close()


def test_copies_and_scattered_pages_are_timed(verb: Callable[..., dict[str, Any]]) -> None:
    cases = verb("memory")["cases"]
    assert not [name for name, case in cases.items() if "error" in case]
    copies = cases["copies of 256 KiB"]
    assert copies["goal"] == pytest.approx(copies["floor"] / 0.85, rel=1e-4)
    assert cases["copies of 256 KiB beside decode"]["decode_ratio"] > 0
    assert cases["attention, tiny, 1 groups, pages scattered over 8 GiB"]["over_dense"] > 0
    assert "the arena has" in cases["attention, tiny, 1 groups, pages scattered over 100 GiB"]["absent"]


def test_steps_with_swaps_are_compared_with_steps_without(verb: Callable[..., dict[str, Any]]) -> None:
    (case,) = verb("serve")["cases"].values()
    assert case["goal"] == pytest.approx(1.05 * case["quiet"]["step_ms"]["p99"], rel=1e-4)
    assert case["measured"] == case["swaps"]["step_ms"]["p99"]
    assert case["swaps"]["tokens_per_s"] > 0
    assert case["loads"] > 0, "adapters came and went"
    assert case["quiet"]["steps"] >= serve.LEAST_STEPS


def test_the_demo_s_answers_are_checked_and_the_tests_run(verb: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    cases = verb("check", status=DONE)["cases"]
    for mode in ("graph", "eager"):
        assert cases[f"demo answers, {mode}"]["measured"] == 20
        assert cases[f"demo answers, {mode}"]["evictions"]["adapter"] > 0
    assert "test_tree" in (tmp_path / "tests.log").read_text()


def test_an_answer_that_differs_is_an_error(tiny: Setup, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    expected = json.loads(demo.EXPECTED.read_text())
    for question in expected["questions"]:
        question["answers"] = {"base": "Something else."}
    (tmp_path / "expected.json").write_text(json.dumps(expected))
    monkeypatch.setattr(demo, "EXPECTED", tmp_path / "expected.json")
    with pytest.raises(EngineError, match=r"20 of 20 answers differ: \('base', .*Something else"):
        commands.check_cases(tiny)[0].run({})


def test_tools_run_the_tests_or_are_told_to_be_missing(
    verb: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert {case["absent"] for case in verb("sanitize")["cases"].values()} == {"compute-sanitizer is not on PATH"}
    for name in ("compute-sanitizer", "ncu"):
        (tmp_path / name).write_text('#!/bin/sh\necho "$PYTORCH_NO_CUDA_MEMORY_CACHING $*"\n[ $2 != racecheck ]\n')
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = verb("sanitize", "--again", status=FAILED)["cases"]
    assert "racecheck ended with status 1" in found["racecheck"]["error"]
    (told,) = found["memcheck"]["tail"]
    assert told.startswith("1 --tool memcheck --error-exitcode 9")
    assert f"-m gpu tests/kernels -k {commands.SANITIZED['memcheck']}" in told
    profiled = verb("profile")["cases"]
    assert (tmp_path / profiled["trace of 32 rows, 32 adapters"]["trace"]).stat().st_size > 1000
    assert "gpu step --out" in profiled["ncu"]["tail"][0]
    assert "--only ^decode, 32 rows, 32 adapters, eager$ --tiny" in profiled["ncu"]["tail"][0]


def is_running(process: int) -> bool:
    stat = Path(f"/proc/{process}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_program_that_takes_too_long_is_stopped(tmp_path: Path) -> None:
    hasty = Setup(device=CPU, out=tmp_path, is_tiny=True, seconds=0.2)
    with pytest.raises(EngineError, match=r"nap was stopped after 0 s; nap\.log has what it printed"):
        commands.run_command(["sh", "-c", "sleep 600 & echo $!; wait"], hasty, "nap")
    child = int((tmp_path / "nap.log").read_text())
    for _ in range(100):  # the kernel may take a moment
        if not is_running(child):
            break
        time.sleep(0.1)
    assert not is_running(child)


def test_flashinfer_is_compared_where_there_is_one(
    verb: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)  # as if it were not installed
    absent = verb("yardstick", "--only", "32 rows, 1 of 64 tokens")["cases"]
    assert "FlashInfer cannot be imported" in absent["32 rows, 1 of 64 tokens"]["absent"]
    answers: list[torch.Tensor] = []
    attention = KernelBench.attention

    def remembered(*arguments: Any, **named: Any) -> Work:
        work = attention(*arguments, **named)
        answers[:] = [work.run(0)]  # type: ignore[list-item]
        return work

    class Wrapper:
        def __init__(self, _workspace: torch.Tensor, layout: str) -> None:
            assert layout == "HND"

        def plan(self, *arguments: Any, **named: Any) -> None:
            *starts, pages, last = arguments[:-4]
            assert arguments[-4:] == (4, 2, 16, 16)
            assert named.pop("causal", True)
            assert set(named) == {"q_data_type", "kv_data_type"}
            assert starts[-1][-1] == len(pages)
            assert pages[0] == 2
            assert 1 <= int(last[0]) <= 16

        def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            assert kv[0].shape[1:] == (2, 16, 16)
            assert answers[0].shape == q.shape
            return answers[0] * factor

    names = ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper")
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(**dict.fromkeys(names, Wrapper)))
    monkeypatch.setattr(KernelBench, "attention", remembered)
    factor = 1.0
    cases = verb("yardstick", "--again", "--only", "32 rows, 1 of 64|512 of")["cases"]
    assert all(case["yardstick"] > 0 and case["difference"] == 0 for case in cases.values())
    factor = 2.0
    found = verb("yardstick", "--only", "64 rows, 1 of 64", status=FAILED)["cases"]["64 rows, 1 of 64 tokens"]
    assert "FlashInfer's attention differs from Weft's by 100.00%" in found["error"]


def test_the_best_constants_are_found_one_after_the_other(
    tiny: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seconds(_run: object, _device: object) -> float:
        found = plans.plan("items", BLOCK_N=64, num_stages=2, num_warps=4)
        if found["num_stages"] == 5:
            raise RuntimeError("out of resource: shared memory")
        return 1.0 + (found["BLOCK_N"] - 32) / 64 - found["num_stages"] / 10

    monkeypatch.setattr(kernels, "per_call_s", seconds)
    sweep = next(case for case in kernels.cases(tiny) if case.name == "constants of items")
    found = sweep.run({})
    assert found["best"] == {"BLOCK_N": 32, "num_stages": 4}
    assert found["before"] == pytest.approx(1.3e6)
    assert found["measured"] == pytest.approx(0.6e6)
    assert found["tried"]["BLOCK_N=32, num_stages=5"] == "RuntimeError: out of resource: shared memory"
    written = json.loads((tmp_path / "plans.json").read_text())
    assert written == {"cpu": {"items": found["best"]}}


def test_without_a_gpu_it_is_said_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not torch.cuda.is_available():
        assert main("gpu", ["step", "--out", str(tmp_path)]) == 2
        assert "sees no CUDA device. Run it where there is one" in capsys.readouterr().err
    assert main("gpu", ["step", "--out", str(tmp_path), "--device", "cpu"]) == 2
    assert "--device cpu needs --tiny" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_the_script_finds_weft_and_hands_its_options_on(tmp_path: Path) -> None:
    script = commands.ROOT / "scripts" / "gpu"
    arguments = ["check", "--out", str(tmp_path), "--device", "cpu", "--tiny", "--only", "nvidia"]
    result = subprocess.run(
        [str(script), *arguments],
        env={"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("nvidia-smi ")


def test_verbs_need_no_package_of_the_server_s(tmp_path: Path) -> None:
    """A rented GPU comes with torch, Triton, transformers and PEFT, and perhaps without a network."""
    program = """
import sys
for name in ("fastapi", "uvicorn", "zmq", "msgspec", "pydantic_settings", "sqlalchemy", "structlog",
             "prometheus_client", "llguidance", "boto3", "alembic"):
    sys.modules[name] = None
from weft.benchmarks.main import main
sys.exit(main("gpu", ["check", "--only", "demo", "--device", "cpu", "--tiny", "--out", sys.argv[1]]))
"""
    command = [sys.executable, "-P", "-c", program, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
