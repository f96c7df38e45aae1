"""Every thing that changes keys and values within an engine, or who may share them, changes the seed."""

from __future__ import annotations

from dataclasses import replace

from manylora.adapters.ref import LoraSpec, content_digest
from manylora.engine.request import FlowKey
from manylora.engine.scheduling.kv_pages import prefix_seed
from simulation.driven import adapter, request

ONE = request("one", ref=adapter("a"), flow=FlowKey(tenant="t"))


def test_equal_requests_share_a_seed_whatever_they_ask_for() -> None:
    other = replace(ONE, request_id="two", prompt_token_ids=[1], choice_index=3)
    assert prefix_seed(ONE) == prefix_seed(other)


def test_each_part_of_the_seed_counts() -> None:
    ref = adapter("a")
    scaled = replace(ref, digest=content_digest(LoraSpec(rank=8, alpha=16.0), ref.weights_sha256))
    seeds = [
        prefix_seed(ONE),
        prefix_seed(replace(ONE, flow=FlowKey(tenant="u"))),
        prefix_seed(replace(ONE, adapter=None)),
        prefix_seed(replace(ONE, adapter=replace(ref, digest="sha256:0"))),
        prefix_seed(replace(ONE, adapter=scaled)),
    ]
    assert len(set(seeds)) == len(seeds)
