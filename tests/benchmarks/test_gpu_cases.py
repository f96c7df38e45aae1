"""How the cases of a verb are kept, and the arithmetic behind them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weft.benchmarks.engine.kernels import Machine, Work
from weft.benchmarks.gpu import floors, kernels, machine, memory, step
from weft.benchmarks.gpu.case_log import DONE, FAILED, UNFINISHED, Case, CaseLog, is_failure, line
from weft.benchmarks.gpu.machine import Setup
from weft.benchmarks.gpu.verbs import VERBS
from weft.benchmarks.model_shapes import MODELS
from weft.errors import ConfigError

CPU = torch.device("cpu")
LLAMA = MODELS[0]
VOCAB = 128_256
H200 = Machine(bytes_per_s=4e12, flops_per_s=790e12)
ABOUT = {"commit": "abc", "gpu": {"name": "H200", "temperature.gpu": "30"}}


class Cases:
    """Cases that note that they were run, and a clock that they move."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.ran: list[str] = []

    def make(self, name: str, seconds: float = 1.0, **found: Any) -> Case:
        def run(_: Mapping[str, Any]) -> dict[str, Any]:
            self.ran.append(name)
            self.now_s += seconds
            if "raises" in found:
                raise RuntimeError(found["raises"])
            return found

        return Case(name, run)

    def clock(self) -> float:
        return self.now_s


@pytest.fixture
def cases() -> Cases:
    return Cases()


def test_each_case_is_in_the_file_as_soon_as_it_ended(tmp_path: Path, cases: Cases) -> None:
    path = tmp_path / "verb.json"

    def look(before: Mapping[str, Any]) -> dict[str, Any]:
        kept = json.loads(path.read_text())
        assert kept["cases"]["first"]["measured"] == 2.5
        assert kept["cases"]["second"] == {"error": "the process ended in this case"}
        assert kept["commit"] == "abc"
        return {"measured": before["first"]["measured"] + 1}

    log = CaseLog(path, ABOUT)
    assert log.run([cases.make("first", measured=2.5), Case("second", look)], 60, cases.clock) == DONE
    kept = json.loads(path.read_text())["cases"]
    assert kept == {"first": {"measured": 2.5, "seconds": 1.0}, "second": {"measured": 3.5, "seconds": 0.0}}
    assert [each.name for each in tmp_path.iterdir()] == ["verb.json"]


def test_what_the_file_has_is_not_run_again(tmp_path: Path, cases: Cases, capsys: pytest.CaptureFixture[str]) -> None:
    path, all_cases = tmp_path / "verb.json", [cases.make(name, seconds=4) for name in "abcd"]
    assert CaseLog(path, ABOUT).run(all_cases, 11, cases.clock) == UNFINISHED
    assert cases.ran == ["a", "b"], "a third would probably end after 12 seconds"
    assert "time is up: 2 cases are left; run it again to go on" in capsys.readouterr().out
    hotter = {**ABOUT, "gpu": {"name": "H200", "temperature.gpu": "70"}}
    assert CaseLog(path, hotter).run(all_cases, 11, cases.clock) == DONE
    assert cases.ran == ["a", "b", "c", "d"]
    assert CaseLog(path, ABOUT).run(all_cases, 0, cases.clock) == DONE


def test_a_case_that_fails_is_kept_and_the_rest_goes_on(tmp_path: Path, cases: Cases) -> None:
    path = tmp_path / "verb.json"
    bad, good = cases.make("bad", raises="out of memory"), cases.make("good")
    assert CaseLog(path, ABOUT).run([bad, good, cases.make("absent", absent="no")], 60, cases.clock) == FAILED
    kept = json.loads(path.read_text())["cases"]
    assert kept["bad"]["error"] == "RuntimeError: out of memory"
    assert "raise RuntimeError" in kept["bad"]["traceback"]
    assert CaseLog(path, ABOUT).run([bad, good], 60, cases.clock) == FAILED
    assert cases.ran == ["bad", "good", "absent"]
    CaseLog(path, ABOUT, again=True).run([bad, good, cases.make("absent")], 60, cases.clock)
    assert cases.ran == ["bad", "good", "absent", "bad", "absent"]


def test_nothing_is_run_on_a_device_that_is_lost(
    tmp_path: Path, cases: Cases, capsys: pytest.CaptureFixture[str]
) -> None:
    path, all_cases = tmp_path / "verb.json", [cases.make("bad", raises="CUDA error"), cases.make("good")]
    assert CaseLog(path, ABOUT, is_well=lambda: False).run(all_cases, 60, cases.clock) == FAILED
    assert cases.ran == ["bad"]
    assert "run it again in a new process" in capsys.readouterr().out
    assert CaseLog(path, ABOUT, is_well=lambda: False).run(all_cases, 60, cases.clock) == FAILED
    assert cases.ran == ["bad", "good"]


def test_a_case_in_which_the_process_died_is_left_out_the_next_time(tmp_path: Path, cases: Cases) -> None:
    def die(_: Mapping[str, Any]) -> dict[str, Any]:
        raise KeyboardInterrupt

    path = tmp_path / "verb.json"
    with pytest.raises(KeyboardInterrupt):
        CaseLog(path, ABOUT).run([Case("deadly", die), cases.make("good")], 60, cases.clock)
    assert CaseLog(path, ABOUT).run([Case("deadly", die), cases.make("good")], 60, cases.clock) == FAILED
    assert cases.ran == ["good"]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "is not what this verb writes"),
        ("[]", "is not what this verb writes"),
        (json.dumps({**ABOUT, "commit": "abd", "cases": {}}), "was measured with another commit"),
        (json.dumps({**ABOUT, "gpu": {"name": "H100"}, "cases": {}}), "was measured with another gpu"),
    ],
)
def test_files_of_others_are_refused(tmp_path: Path, content: str, complaint: str) -> None:
    (tmp_path / "verb.json").write_text(content)
    with pytest.raises(ConfigError, match=complaint):
        CaseLog(tmp_path / "verb.json", ABOUT)
    assert (tmp_path / "verb.json").read_text() == content


def test_a_line_shows_figure_floor_and_goal() -> None:
    found = {"measured": 15.0, "floor": 10.0, "goal": 14.0, "unit": "us"}
    assert line("name", found).split() == [
        "name",
        "measured",
        "15",
        "floor",
        "10",
        "(1.50x)",
        "goal",
        "14",
        "us",
        "MISSED",
    ]
    assert line("name", {**found, "measured": 13.0}).endswith("us  ok")
    assert line("name", {"measured": 3.0, "unit": "ms"}).split() == ["name", "measured", "3", "ms"]
    assert line("name", {"absent": "ncu is not there"}).split(maxsplit=1)[1] == "absent: ncu is not there"
    assert line("name", {"error": "one\ntwo"}).endswith("error: one")
    assert is_failure({"measured": 1.0, "ok": False})
    assert not is_failure({"absent": "it"})
    assert not is_failure({"measured": 1e12})


def test_floors_of_decode_steps_are_those_of_their_bytes() -> None:
    assert floors.weight_elements(LLAMA, VOCAB) * 2 == pytest.approx(15.01e9, rel=1e-3)
    assert floors.lora_elements(LLAMA, [16]) * 2 == 80 << 20
    assert floors.kv_elements(LLAMA, 32 * 1024) * 2 == pytest.approx(4.295e9, rel=1e-3)

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


def test_adapters_have_goals_where_the_base_was_measured() -> None:
    assert step.goal_of(0, 4.0, None) == {"goal": 5.0}
    assert step.goal_of(1, 4.0, {"measured": 6.0}) == {"goal": pytest.approx(6.48)}
    assert step.goal_of(32, 4.0, {"measured": 6.0}) == {"goal": 7.5}
    assert step.goal_of(8, 4.0, {"measured": 6.0}) == {}
    assert step.goal_of(1, 4.0, {"error": "out of memory"}) == {}
    assert step.goal_of(1, 4.0, None) == {}


def test_what_the_device_did_is_counted_per_step() -> None:
    def events() -> Iterator[tuple[str, bool, float]]:
        for _ in range(2):
            yield from [("item_kernel", True, 30.0), ("nvjet_tst_64x8", True, 50.0), ("Memset (Device)", True, 1.0)]
            yield from [("Memcpy HtoD (Pinned -> Device)", True, 2.0), ("Memcpy DtoH (Device -> Pinned)", True, 1.0)]
            yield from [("cudaStreamSynchronize", False, 900.0), ("cudaLaunchKernel", False, 3.0)]

    assert step.count_work(events(), 2) == {
        "launches": 3,
        "copies_in": 1,
        "copies_out": 1,
        "synchronizes": 1,
        "device_ms": pytest.approx(0.084),
        "kernels_us": {
            "nvjet_tst_64x8": 50,
            "item_kernel": 30,
            "Memcpy HtoD (Pinned -> Device)": 2,
            "Memset (Device)": 1,
            "Memcpy DtoH (Device -> Pinned)": 1,
        },
    }


def test_pages_are_scattered_evenly_and_each_is_taken_once() -> None:
    assert memory.scattered_pages(4, 0, 10) == [1, 2, 3, 4]
    found = memory.scattered_pages(100, 5000, 6000)
    assert found is not None
    assert len(set(found)) == 100
    assert sorted(found)[:3] == [1, 51, 101]
    assert found != sorted(found)
    assert 4900 < max(found) <= 5000
    assert memory.scattered_pages(100, 6000, 6000) is None
    assert memory.scattered_pages(10, 0, 10) is None


def test_a_verb_of_the_real_size_has_cases_for_what_is_to_be_known(tmp_path: Path) -> None:
    setup = Setup(device=CPU, out=tmp_path)
    names = {verb: [case.name for case in make(setup)] for verb, make in VERBS.items()}
    assert all(len(found) == len(set(found)) for found in names.values())
    assert not any(tmp_path.iterdir()), "cases are made without measuring"
    assert names["kernels"][0] == "attention, 32 rows, context 1,024"
    assert "attention, 64 rows, context 16,384" not in names["kernels"], "it needs 128 GiB"
    assert {f"LoRA {site}, 32 rows, 32 of rank 16" for site in ("qkv", "o", "gate_up", "down")} < set(names["kernels"])
    assert "constants of shrink 14336 16" in names["kernels"]
    assert names["step"][0] == "decode, 32 rows, 0 adapters, graph"
    assert names["step"].index("decode, 32 rows, 32 adapters, graph") < names["step"].index(
        "prompt of 512, 0 adapters, graph"
    )
    assert "decode, 8 rows, 32 adapters, eager" not in names["step"]
    assert any("Llama-2-7B, 4 groups" in name for name in names["memory"])


def test_a_sweep_is_about_the_kernel_that_it_names(tmp_path: Path) -> None:
    setup = Setup(device=CPU, out=tmp_path, is_tiny=True)
    bench = kernels.bench_of(setup)
    works = {kernel: kernels.work_of(kernel, setup, bench).name for kernel in kernels.sweeps(setup)}
    assert works == {
        "items": "attention, context 64",
        "chunks": "attention, prompt of 64",
        "shrink 160 16": "LoRA down",
        "shrink 64 16": "LoRA qkv",
    }


def test_a_call_that_changes_its_bits_is_found() -> None:
    out = torch.zeros(3)
    assert kernels.repeats(Work("steady", lambda _: out.add_(1), 1.0, out=out))
    grows = iter(range(10))
    assert not kernels.repeats(Work("moody", lambda _: out.add_(next(grows)), 1.0, out=out))
    with pytest.raises(ValueError, match="got nothing"):
        kernels.repeats(Work("nothing", print, 1.0))


def test_a_timer_takes_the_calls_in_order() -> None:
    calls: list[int] = []
    timer = machine.Timer(calls.append, CPU, calls=3)
    seconds = timer.seconds(2)
    assert calls == [0, 1, 2] * 3, "the first pass is not timed"
    assert len(seconds) == 2
    assert all(each > 0 for each in seconds)


class FakeCuda:
    """What the timers use of torch.cuda, on a CPU: events that are a second apart, and a graph that is run again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.now_ms = 0.0
        fake, log = self, self.log

        class Event:
            def __init__(self, *, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                fake.now_ms += 1000
                self.at_ms = fake.now_ms

            def synchronize(self) -> None:
                log.append("waited for an event")

            def elapsed_time(self, end: Event) -> float:
                return end.at_ms - self.at_ms

        class Graph:
            def replay(self) -> None:
                log.append("replay")

        stream = SimpleNamespace(synchronize=lambda: log.append("waited for the stream"))
        for name, value in {
            "Event": Event,
            "CUDAGraph": Graph,
            "Stream": lambda: stream,
            "graph": lambda _: nullcontext(),
            "stream": lambda _: nullcontext(),
            "current_stream": lambda: stream,
            "synchronize": lambda: log.append("waited for the device"),
            "empty_cache": lambda: log.append("emptied"),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)


def test_on_a_gpu_replays_of_one_graph_are_timed_between_events(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, calls, cuda = FakeCuda(monkeypatch), list[int](), torch.device("cuda")
    timer = machine.Timer(calls.append, cuda, calls=3)
    assert calls == [0, 1, 2] * 2, "once to compile, once to capture"
    assert fake.log == ["waited for the device"]
    assert timer.seconds(2) == [1.0, 1.0]
    assert fake.log[1:] == ["replay"] * 3 + ["waited for the stream"]
    assert len(calls) == 6
    assert machine.per_call_s(calls.append, cuda, calls=4) == 0.25
    assert memory.copy_s(cuda, lambda: calls.append(-1)) == 1.0
    assert (calls[-1], fake.log[-1]) == (-1, "waited for an event")


def test_a_device_that_does_not_answer_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, cuda = FakeCuda(monkeypatch), torch.device("cuda")
    assert machine.release(CPU)
    assert machine.release(cuda)
    assert fake.log == ["waited for the device", "emptied"]

    def fail() -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    assert not machine.release(cuda)


def test_a_result_says_what_it_was_measured_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=141 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '580.1, 1980 MHz, 1980 MHz, 3201 MHz, 120.5 W, 41, 12 MiB, 143771 MiB'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    about = machine.describe_device(torch.device("cuda"))
    assert (about["name"], about["capability"], about["memory_gib"]) == ("NVIDIA H200", "9.0", 141)
    assert (about["driver_version"], about["clocks.sm"]) == ("580.1", "1980 MHz")
    monkeypatch.setenv("PATH", "/nowhere")
    assert machine.describe_device(CPU) == {"name": "cpu", "cuda": torch.version.cuda}
