"""How the cases of a verb are kept, and the arithmetic behind them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from manylora.benchmarks.engine.kernels import Machine, Work, call_s
from manylora.benchmarks.gpu import case_log, floors, kernels, memory, step
from manylora.benchmarks.gpu.case_log import DONE, FAILED, UNFINISHED, is_failure, line, run_cases
from manylora.benchmarks.gpu.setup import Setup, describe_device, release
from manylora.benchmarks.gpu.verbs import VERBS
from manylora.benchmarks.model_shapes import MODELS, kv_elements, lora_elements, weight_elements

CPU = torch.device("cpu")
LLAMA = MODELS[0]
VOCAB = 128_256
H200 = Machine(bytes_per_s=4e12, flops_per_s=790e12)
ABOUT = {"commit": "abc", "gpu": "H200"}


class Recorder:
    """Makes cases that note that they were run, and is the clock that they move."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.ran: list[str] = []

    def case(self, name: str, seconds: float = 1.0, **found: Any) -> Callable[[], dict[str, Any]]:
        def run() -> dict[str, Any]:
            self.ran.append(name)
            self.now_s += seconds
            if "raises" in found:
                raise RuntimeError(found["raises"])
            return found

        return run

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(case_log, "time", recorder)
    return recorder


def test_each_case_is_in_the_file_as_soon_as_it_ended(tmp_path: Path, recorder: Recorder) -> None:
    path = tmp_path / "verb.json"

    def look() -> dict[str, Any]:
        kept = json.loads(path.read_text())
        assert kept["cases"]["first"]["measured"] == 2.5
        assert kept["cases"]["second"] == {"error": "the process ended in this case"}
        assert kept["commit"] == "abc"
        return {"measured": 3.5}

    cases = {"first": recorder.case("first", measured=2.5), "second": look}
    assert run_cases(path, ABOUT, cases, 60) == DONE
    kept = json.loads(path.read_text())["cases"]
    assert kept == {
        "first": {"measured": 2.5, "seconds": 1.0},
        "second": {"measured": 3.5, "seconds": 0.0},
    }
    assert [each.name for each in tmp_path.iterdir()] == ["verb.json"]


def test_what_the_file_has_is_not_run_again(
    tmp_path: Path, recorder: Recorder, capsys: pytest.CaptureFixture[str]
) -> None:
    path, cases = tmp_path / "verb.json", {name: recorder.case(name, seconds=4) for name in "abcd"}
    assert run_cases(path, ABOUT, cases, 11) == UNFINISHED
    assert recorder.ran == ["a", "b"], "a third would probably end after 12 seconds"
    assert "time is up: run it again to go on" in capsys.readouterr().out
    assert run_cases(path, {**ABOUT, "nvidia_smi": ["70"]}, cases, 11) == DONE
    assert recorder.ran == ["a", "b", "c", "d"]
    assert run_cases(path, ABOUT, cases, 0) == DONE


def test_a_case_that_fails_is_kept_and_the_rest_goes_on(tmp_path: Path, recorder: Recorder) -> None:
    path = tmp_path / "verb.json"
    cases = {"bad": recorder.case("bad", raises="out of memory"), "good": recorder.case("good")}
    assert run_cases(path, ABOUT, cases, 60) == FAILED
    kept = json.loads(path.read_text())["cases"]
    assert kept["bad"]["error"] == "RuntimeError: out of memory"
    assert "raise RuntimeError" in kept["bad"]["traceback"]
    assert run_cases(path, ABOUT, cases, 60) == FAILED
    assert recorder.ran == ["bad", "good"]


def test_nothing_is_run_on_a_device_that_is_lost(
    tmp_path: Path, recorder: Recorder, capsys: pytest.CaptureFixture[str]
) -> None:
    path, cases = (
        tmp_path / "verb.json",
        {"bad": recorder.case("bad", raises="CUDA"), "good": recorder.case("good")},
    )
    assert run_cases(path, ABOUT, cases, 60, lambda: False) == FAILED
    assert recorder.ran == ["bad"]
    assert "the device is lost: run it again to go on" in capsys.readouterr().out
    assert run_cases(path, ABOUT, cases, 60, lambda: False) == FAILED
    assert recorder.ran == ["bad", "good"]


def test_a_case_in_which_the_process_died_is_left_out_the_next_time(
    tmp_path: Path, recorder: Recorder
) -> None:
    def die() -> dict[str, Any]:
        raise KeyboardInterrupt

    path, cases = tmp_path / "verb.json", {"deadly": die, "good": recorder.case("good")}
    with pytest.raises(KeyboardInterrupt):
        run_cases(path, ABOUT, cases, 60)
    assert run_cases(path, ABOUT, cases, 60) == FAILED
    assert recorder.ran == ["good"]


@pytest.mark.parametrize("other", [{"commit": "abd"}, {"gpu": "H100"}])
def test_figures_of_another_commit_or_gpu_are_kept_apart(
    tmp_path: Path, recorder: Recorder, other: dict[str, str]
) -> None:
    path, cases = tmp_path / "verb.json", {"one": recorder.case("one")}
    run_cases(path, ABOUT | other, cases, 60)
    before = path.read_text()
    assert run_cases(path, ABOUT, cases, 60) == DONE
    assert recorder.ran == ["one", "one"]
    about = {**ABOUT, **other}
    assert (tmp_path / f"verb {about['gpu']} {about['commit']}.json").read_text() == before


def test_a_line_shows_figure_floor_and_goal() -> None:
    found = {"measured": 15.0, "floor": 10.0, "goal": 14.0, "unit": "us"}
    shown = ["name", "measured", "15", "floor", "10", "goal", "14", "us", "(1.50x)", "MISSED"]
    assert line("name", found).split() == shown
    assert line("name", {**found, "measured": 13.0}).endswith("us  (1.30x)")
    assert line("name", {"measured": 3.0, "unit": "ms"}).split() == ["name", "measured", "3", "ms"]
    assert (
        line("name", {"absent": "ncu is not there"}).split(maxsplit=1)[1]
        == "absent: ncu is not there"
    )
    assert line("name", {"error": "one\ntwo"}).endswith("error: one")
    assert line("tests", {"note": "7 passed"}).split(maxsplit=1)[1] == "7 passed"
    assert is_failure({"measured": 1.0, "ok": False})
    assert not is_failure({"absent": "it"})
    assert not is_failure({"measured": 1e12})


def test_floors_of_decode_steps_are_those_of_their_bytes() -> None:
    assert weight_elements(LLAMA, VOCAB) * 2 == pytest.approx(15.01e9, rel=1e-3)
    assert lora_elements(LLAMA, [16]) * 2 == 80 << 20
    assert kv_elements(LLAMA, 32 * 1024) * 2 == pytest.approx(4.295e9, rel=1e-3)

    def floor_ms(rows: int, context: int, ranks: list[int]) -> float:
        return 1e3 * floors.decode_floor_s(LLAMA, VOCAB, rows, context, ranks, H200)

    assert floor_ms(32, 128, []) == pytest.approx(3.89, abs=0.01)
    assert floor_ms(32, 1024, []) == pytest.approx(4.83, abs=0.01)
    assert floor_ms(32, 1024, [16]) == pytest.approx(4.85, abs=0.01)
    assert floor_ms(32, 1024, [16] * 32) == pytest.approx(5.50, abs=0.01)
    assert floor_ms(256, 0, []) == pytest.approx(4.86, abs=0.01), "arithmetic, no longer bytes"


def test_floors_of_prompts_are_those_of_their_arithmetic() -> None:
    base = 1e3 * floors.prompt_floor_s(LLAMA, VOCAB, 2048, [], H200)
    assert base == pytest.approx(36.2 + 1.39, abs=0.05)
    adapter = 1e3 * floors.prompt_floor_s(LLAMA, VOCAB, 2048, [16], H200)
    assert adapter - base == pytest.approx(0.22, abs=0.01)


def test_what_the_device_did_is_counted_per_step() -> None:
    steps = step.PROFILED_STEPS
    events = [
        SimpleNamespace(key=name, count=count * steps, self_device_time_total=us * steps)
        for name, count, us in (
            ("item_kernel", 32, 30.0),
            ("nvjet_tst_64x8", 128, 50.0),
            ("Memset (Device)", 1, 1.0),
            ("Memcpy HtoD (Pinned -> Device)", 1, 2.0),
            ("Memcpy DtoH (Device -> Pinned)", 1, 1.0),
        )
    ]
    found = step.count_work(events)
    assert (found["launches"], found["device_ms"]) == (161, pytest.approx(0.084))
    assert list(found["kernel_us"].items())[:2] == [("nvjet_tst_64x8", 50), ("item_kernel", 30)]
    assert found["kernel_calls"]["item_kernel"] == 32
    assert found["kernel_calls"]["Memcpy HtoD (Pinned -> Device)"] == 1


def test_pages_are_scattered_evenly_and_each_is_taken_once() -> None:
    assert memory.scattered_pages(4, 4) == [1, 2, 3, 4]
    found = memory.scattered_pages(100, 5000)
    assert len(set(found)) == 100
    assert sorted(found)[:3] == [1, 51, 101]
    assert found != sorted(found)
    assert 4900 < max(found) <= 5000


def test_a_verb_of_the_real_size_has_cases_for_what_is_to_be_known(tmp_path: Path) -> None:
    setup = Setup(device=CPU, out=tmp_path)
    names = {verb: list(make(setup)) for verb, make in VERBS.items()}
    assert not any(tmp_path.iterdir()), "cases are made without measuring"
    assert names["kernels"][0] == "attention, 32 rows, context 1,024"
    assert "attention, 64 rows, context 16,384" not in names["kernels"], "it needs 128 GiB"
    assert {"LoRA, 32 rows, 32 of rank 16", "constants of LoRA"} < set(names["kernels"])
    assert names["step"][:2] == ["decode, 32 rows, 0 adapters", "decode, 32 rows, 1 adapters"]
    assert "decode, 64 rows, 64 adapters" in names["step"]
    assert "decode, 8 rows, 32 adapters" not in names["step"]
    assert "prompt of 2048, 1 adapters" in names["step"]
    assert names["check"] == ["tests"]
    assert names["sanitize"] == ["memcheck", "racecheck", "synccheck"]
    assert names["profile"] == ["decode, 32 rows, 0 adapters", "decode, 32 rows, 32 adapters"]
    assert "attention over scattered pages, Llama-2-7B" in names["memory"]


def test_results_are_what_is_returned_or_added_to_zeros() -> None:
    out = torch.ones(3)
    steady = Work("steady", lambda _: out.add_(1), 1.0, out=out)
    assert torch.equal(kernels.result(steady), torch.ones(3))
    assert torch.equal(kernels.result(steady), torch.ones(3))
    assert torch.equal(
        kernels.result(Work("returns", lambda call: torch.tensor([call]), 1.0)), torch.tensor([0])
    )


def test_on_a_gpu_calls_are_timed_in_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def do_bench_cudagraph(run: Callable[[], object], *, return_mode: str) -> float:
        assert return_mode == "median"
        assert torch.is_inference_mode_enabled()
        run()
        run()
        return 0.25

    monkeypatch.setitem(
        sys.modules, "triton.testing", SimpleNamespace(do_bench_cudagraph=do_bench_cudagraph)
    )
    assert call_s(calls.append, torch.device("cuda")) == 0.25e-3
    assert calls == [0, 1]


def test_a_device_that_does_not_answer_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: done.append(name))
    assert release(CPU)
    assert done == []
    assert release(torch.device("cuda"))
    assert done == ["synchronize", "empty_cache"]

    def fail() -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    assert not release(torch.device("cuda"))


def test_a_result_says_what_it_was_measured_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho \"$1\"\necho '580.1, 1980 MHz'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    about = describe_device(torch.device("cuda"))
    assert (about["gpu"], about["nvidia_smi"][1]) == ("NVIDIA H200", "580.1, 1980 MHz")
    assert "driver_version,clocks.sm" in about["nvidia_smi"][0]
    monkeypatch.setenv("PATH", "/nowhere")
    assert describe_device(torch.device("cuda"))["nvidia_smi"] == []
    assert describe_device(CPU) == {"gpu": None}
