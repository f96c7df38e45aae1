"""Drive an in-process engine until everything submitted has ended."""

from __future__ import annotations

import time
from collections.abc import Sequence

from manylora.engine.core import EngineCore
from manylora.engine.request import GenerationRequest, RequestOutput


def run_all(
    core: EngineCore, requests: Sequence[GenerationRequest], *, timeout_s: float = 60
) -> dict[str, list[int]]:
    """Submit all at once; returns the tokens by request id. A request that ends in an error is a failure."""
    outputs = collect(core, requests, timeout_s=timeout_s)
    tokens: dict[str, list[int]] = {}
    for request_id, parts in outputs.items():
        assert parts[-1].error is None, parts[-1].error
        tokens[request_id] = [token for part in parts for token in part.token_ids]
    return tokens


def collect(
    core: EngineCore, requests: Sequence[GenerationRequest], *, timeout_s: float = 60
) -> dict[str, list[RequestOutput]]:
    """Submit all at once; returns every output by request id."""
    outputs: dict[str, list[RequestOutput]] = {request.request_id: [] for request in requests}
    for request in requests:
        core.submit(request)
    waiting = set(outputs)
    deadline = time.monotonic() + timeout_s
    while waiting:
        assert time.monotonic() < deadline, f"still waiting for {sorted(waiting)[:5]}"
        for output in core.pump():
            outputs[output.request_id].append(output)
            if output.finish_reason is not None:
                waiting.remove(output.request_id)
    return outputs
