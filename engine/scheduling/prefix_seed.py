"""What keys and values depend on besides the tokens, and who may share them: what stands before a request's blocks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict

from weft.engine.model.rope_spec import RopeSpec
from weft.engine.request import GenerationRequest
from weft.memory.token_chain import chain_seed

PrefixSeed = Callable[[GenerationRequest], bytes]


def prefix_seed(base_digest: str, kv_dtype: str, rope: RopeSpec) -> PrefixSeed:
    """A function from a request to the seed of its chain of blocks.

    Two requests share cached blocks only within one tenant, and only if the same weights compute them in the same way.

    Args:
        base_digest: The base model.
        kv_dtype: Element type of keys and values.
        rope: The rotary embedding in them.
    """
    rope_settings = json.dumps(asdict(rope), sort_keys=True, separators=(",", ":"), allow_nan=False)

    def seed(request: GenerationRequest) -> bytes:
        adapter = request.adapter
        # The adapter's digest is of its weights and of its config.
        return chain_seed(
            request.flow.tenant,
            base_digest,
            "" if adapter is None else adapter.digest,
            kv_dtype,
            rope_settings,
        )

    return seed
