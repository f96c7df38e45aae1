"""Adapters that were deleted while requests still need them."""

from __future__ import annotations

from pathlib import Path

from adapters_factory import random_lora, tiny_base
from residency_parts import make_residency, store


def test_the_size_of_a_deleted_adapter_is_known_while_it_is_in_use(tmp_path: Path) -> None:
    """Whether a request can ever fit beside its adapter is asked until it runs, and the adapter may go meanwhile."""
    parts = make_residency(tmp_path)
    (ref,) = store(parts, tmp_path, [random_lora(tiny_base(), 8, seed=0)])
    residency = parts.residency
    residency.want(ref)
    parts.settle()
    num_pages = residency.pages_needed(ref)
    assert num_pages == parts.pool.counts()["adapter"] > 0
    residency.forget(ref.digest)
    assert residency.state(ref.digest) == "device"
    assert residency.pages_needed(ref) == num_pages
    residency.unwant(ref.digest)
    assert residency.state(ref.digest) == "stored"
    assert residency.pages_needed(ref) is None
