from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from api_adapters import sound
from blob_io import store
from fake_engine import demo_ready
from manylora.adapters.blobs.local import LocalBlobs
from manylora.adapters.checkpoint.reader import check_weights
from manylora.errors import AdapterFormatError, AdapterIncompatibleError
from manylora.server.uploads import validation
from manylora.server.uploads.validation import AdapterValidator

pytestmark = pytest.mark.anyio


@pytest.fixture
async def validator(tmp_path: Path) -> AsyncIterator[AdapterValidator]:
    made = AdapterValidator(demo_ready(), LocalBlobs(tmp_path))
    yield made
    await made.close()


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    (tmp_path / "w").write_bytes(sound().weights)
    return tmp_path / "w"


@pytest.mark.parametrize(
    ("name", "wall_factor"), [("missing", validation.WALL_FACTOR), ("w", 1e-5)]
)
async def test_a_check_that_dies_or_takes_too_long_refuses_the_upload(
    validator: AdapterValidator,
    weights: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    wall_factor: float,
) -> None:
    monkeypatch.setattr(validation, "WALL_FACTOR", wall_factor)
    with pytest.raises(AdapterFormatError) as refused:
        await validator.validate(sound().config, weights.with_name(name), "a" * 64, 1)
    assert refused.value.code == "adapter.check_failed"


async def test_the_child_gets_no_secret(
    validator: AdapterValidator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text(
        f"#!{sys.executable}\nimport json, os\ninput()\nprint(json.dumps([json.loads(input())[0], dict(os.environ)]))\n"
    )
    program.chmod(0o700)
    for name in ("MANYLORA_ADMIN_KEY", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD", "HARMLESS"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setattr(sys, "executable", str(program))
    seen = await validator.in_child({"config": ""}, 10)
    assert [name for name, value in seen.items() if value == "secret"] == ["HARMLESS"]


async def test_an_adapter_that_leaves_no_page_for_kv_cache_is_refused(
    validator: AdapterValidator, weights: Path, tmp_path: Path
) -> None:
    pages = await validator.pages(await validator.validate(sound().config, weights, "a" * 64, 1))
    assert pages is not None
    tight, roomy = (
        AdapterValidator(demo_ready(num_pages=n), LocalBlobs(tmp_path)) for n in (pages, pages + 1)
    )
    with pytest.raises(AdapterIncompatibleError) as refused:
        await tight.validate(sound().config, weights, "a" * 64, 1)
    assert refused.value.code == "adapter.never_fits"
    await roomy.validate(sound().config, weights, "a" * 64, 1)
    await tight.close()
    await roomy.close()


async def test_adapters_trained_alike_are_counted_by_their_headers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A header is read once for all that have it; the blob has to be there for each, and the config counts too."""
    blobs = LocalBlobs(tmp_path)
    stored = []
    for seed, rank in ((1, 8), (2, 8), (3, 32)):
        weights = sound(rank=rank).weights[:-4] + bytes((seed, 0, 0, 0))
        sha256 = store(blobs, weights)
        first = AdapterValidator(demo_ready(), blobs)
        facts = await first.validate(
            sound(rank=rank).config, blobs.path(sha256), sha256, len(weights)
        )
        stored.append((facts, await first.pages(facts)))
        await first.close()
    counted = Mock(wraps=check_weights)
    monkeypatch.setattr(validation, "check_weights", counted)
    restarted = AdapterValidator(demo_ready(), blobs)
    assert [await restarted.pages(facts) for facts, _ in stored] == [pages for _, pages in stored]
    assert [call.args[0].rank for call in counted.call_args_list] == [8, 32]
    other_spec = replace(
        stored[0][0], digest="sha256:" + "1" * 64, spec=replace(stored[0][0].spec, rank=4)
    )
    assert await restarted.pages(other_spec) is None
    gone = AdapterValidator(demo_ready(), blobs)
    assert await gone.pages(stored[0][0]) == stored[0][1]
    blobs.delete(stored[1][0].weights_sha256)
    assert await gone.pages(stored[1][0]) is None


async def test_only_the_loop_changes_what_is_kept_of_counts(
    validator: AdapterValidator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list of adapters counts up to 1,000 at once, in threads."""
    weights, blobs = sound().weights, LocalBlobs(tmp_path)
    with blobs.create() as writer:
        writer.write(weights)
        sha256 = writer.commit()
    facts = await validator.validate(sound().config, blobs.path(sha256), sha256, len(weights))
    threads: set[int] = set()

    class Bound(int):
        def __lt__(self, kept: int) -> bool:
            threads.add(threading.get_ident())
            return super().__lt__(kept)

    monkeypatch.setattr(validation, "PAGES_CACHED", Bound(2))
    specs = [replace(facts.spec, alpha=float(number)) for number in range(1, 9)]
    listed = [
        replace(facts, digest=f"sha256:{number:064}", spec=spec)
        for number, spec in enumerate(specs)
    ]
    assert set(await asyncio.gather(*map(validator.pages, listed))) == {
        await validator.pages(facts)
    }
    assert threads == {threading.get_ident()}


async def test_a_process_is_kept_for_the_next_upload(
    validator: AdapterValidator, weights: Path
) -> None:
    alone = await validator.validate(sound().config, weights, "a" * 64, 1)
    assert await validator.validate(sound().config, weights, "a" * 64, 1) == alone
    together = [validator.validate(sound().config, weights, "a" * 64, 1) for _ in range(4)]
    assert await asyncio.gather(*together) == [alone] * 4
    kept = kept_processes()
    assert 1 <= len(kept) <= validation.CHILDREN
    await validator.validate(sound().config, weights, "a" * 64, 1)
    assert set(kept_processes()) <= set(kept)
    await validator.close()
    assert kept_processes() == []


@pytest.mark.parametrize(("cpu_s", "wall_factor"), [(1, 60.0), (30, 0.02)])
async def test_a_kept_process_holds_each_job_to_its_limits(
    validator: AdapterValidator,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cpu_s: int,
    wall_factor: float,
) -> None:
    """Of CPU time, which ends the fork, and of time, which ends both; the next job finds a process."""
    monkeypatch.setattr(validation, "WALL_FACTOR", wall_factor)
    job = {"config": "", "spin": "yes"}
    program = tmp_path / "python"
    program.write_text(
        f"#!{sys.executable}\n"
        "import sys\n"
        "from manylora.server.sandbox.worker import answer_jobs, read_setup\n"
        "def answer(job):\n"
        "    while job.get('spin'): pass\n"
        "    return {}\n"
        "read_setup()\n"
        "answer_jobs(lambda: answer, 1 << 29, one_per_fork=True)\n"
    )
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(AdapterFormatError) as refused:
        await validator.in_child(job, cpu_s)
    assert refused.value.code == "adapter.check_failed"
    monkeypatch.setattr(validation, "WALL_FACTOR", 60.0)
    assert await validator.in_child({"config": ""}, 10) == {}
    await validator.close()


async def test_a_kept_process_that_died_is_replaced(
    validator: AdapterValidator, weights: Path
) -> None:
    await validator.validate(sound().config, weights, "a" * 64, 1)
    (process,) = kept_processes()
    process.kill()
    process.wait()
    await asyncio.sleep(0.1)  # until the event loop knows
    await validator.validate(sound().config, weights, "a" * 64, 1)
    await validator.close()


def kept_processes() -> list[psutil.Process]:
    alive = [
        child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE
    ]
    return [
        child for child in alive if "manylora.server.uploads.validation_worker" in child.cmdline()
    ]
