"""Every thing that changes keys and values, or who may share them, changes the seed."""

from __future__ import annotations

from dataclasses import replace

from manylora.adapters.ref import LoraSpec, content_digest
from manylora.engine.model.rope_spec import RopeSpec
from manylora.engine.request import FlowKey
from manylora.engine.scheduling.kv_pages import prefix_seed
from manylora.kernels.weight_format import number_format
from simulation.driven import adapter, request

ONE = request("one", ref=adapter("a"), flow=FlowKey(tenant="t"))


def test_equal_requests_share_a_seed_whoever_sends_them_and_whatever_they_ask_for() -> None:
    seed = prefix_seed("base", "float32", RopeSpec())
    assert seed(ONE) == seed(replace(ONE, request_id="two", prompt_token_ids=[1], choice_index=3))
    assert seed(ONE) == prefix_seed("base", "float32", RopeSpec())(ONE)


def test_each_part_of_the_seed_counts() -> None:
    ref = adapter("a")
    scaled = replace(ref, digest=content_digest(LoraSpec(rank=8, alpha=16.0), ref.weights_sha256))
    seed = prefix_seed("base", "float32", RopeSpec())
    seeds = [
        seed(ONE),
        seed(replace(ONE, flow=FlowKey(tenant="u"))),
        seed(replace(ONE, adapter=None)),
        seed(replace(ONE, adapter=replace(ref, digest="sha256:0"))),
        seed(replace(ONE, adapter=scaled)),
        prefix_seed("other", "float32", RopeSpec())(ONE),
        prefix_seed("base", "bfloat16", RopeSpec())(ONE),
        prefix_seed("base", number_format("bfloat16", "bf16", is_kv_int8=True), RopeSpec())(ONE),
        prefix_seed("base", number_format("float32", "int8", is_kv_int8=False), RopeSpec())(ONE),
        prefix_seed("base", "float32", RopeSpec(theta=5e5))(ONE),
        prefix_seed("base", "float32", RopeSpec(kind="linear", factor=2.0))(ONE),
    ]
    assert len(set(seeds)) == len(seeds)
