"""An engine without a model: the server's tests say what it writes, how fast, and how it fails."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from manylora.adapters.blobs.memory import MemoryPlace
from manylora.adapters.ref import AdapterRef
from manylora.engine.fairness.service import TenantLoad
from manylora.engine.model.spec import base_shape, read_spec
from manylora.engine.process.client import EngineClient
from manylora.engine.request import (
    AdapterState,
    ErrorInfo,
    GenerationRequest,
    RequestOutput,
    TokenLogprobs,
)
from manylora.engine.status import (
    EngineLoad,
    EngineReady,
    EngineStatus,
    MemoryPlan,
    PauseMode,
    ResidentAdapter,
    StepBatches,
    StepStats,
)
from manylora.engine.text.tokenizer import Tokenizer
from manylora.errors import EngineUnavailableError
from manylora.memory.geometry import page_geometry
from manylora.memory.pool import PageMap, PageUse

DEMO_MODEL = Path(__file__).resolve().parents[2] / "manylora" / "demo" / "manylora-demo"
BASE_TEXT = "the base speaks plainly"
Writer = Callable[[GenerationRequest], str]


@cache
def demo_tokenizer() -> Tokenizer:
    return Tokenizer(DEMO_MODEL)


def demo_ready(max_model_len: int = 256, num_pages: int = 4096) -> EngineReady:
    """What an engine with the demo model says of itself."""
    spec = read_spec(DEMO_MODEL)
    base = base_shape(spec, "sha256:" + "0" * 64)
    geometry = page_geometry(
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype_bytes=4,
        largest_row_features=base.largest_row_features,
    )
    memory = MemoryPlan(
        weight_bytes=1,
        arena_bytes=num_pages * geometry.page_bytes,
        num_pages=num_pages,
        kv_tokens=num_pages * geometry.page_tokens,
        rank16_pages=4,
        rank16_adapters=num_pages // 4,
        slots=256,
        table_bytes=1,
        host_pages=1,
        step_tokens=512,
    )
    return EngineReady(
        boot_id="boot-1",
        model_path=str(DEMO_MODEL),
        device="cpu",
        dtype="float32",
        max_model_len=max_model_len,
        vocab_size=spec.vocab_size,
        base=base,
        geometry=geometry,
        memory=memory,
        max_rank=64,
    )


def write_plainly(request: GenerationRequest) -> str:
    """The base says one thing, an adapter names its digest, choices differ by their index."""
    said = (
        BASE_TEXT if request.adapter is None else f"adapter {request.adapter.digest[7:15]} speaks"
    )
    return said if request.choice_index == 0 else f"{said} choice {request.choice_index}"


@dataclass(slots=True)
class Work:
    """What was computed for a request, as far as the engine lived to say so."""

    prompt_tokens: int = 0
    """With those from the prefix cache."""
    output_tokens: int = 0

    def lose(self, output: RequestOutput, *, is_dead: bool) -> None:
        """Forget an output that nobody will hear of; a dead engine cannot tell how far it came with a prompt either."""
        self.output_tokens -= len(output.token_ids)
        if is_dead and not self.output_tokens:
            self.prompt_tokens = 0


class FakeEngine(EngineClient):
    """Writes what `write` says, a token per turn of the event loop (or per `token_s` seconds), then stops."""

    def __init__(self, ready: EngineReady | None = None) -> None:
        self.ready: EngineReady | None = ready or demo_ready()
        self.load: EngineLoad | None = None
        self.write: Writer = write_plainly
        self.cached: Callable[[GenerationRequest], int] = lambda _: 0
        """Prompt tokens found in the prefix cache."""
        self.logprob: Callable[[GenerationRequest], float] = lambda _: -0.25
        """Of every token."""
        self.token_s = 0.0
        self.chunk_tokens: int | None = None
        """Prompt tokens computed in a turn; None computes a prompt together with the first token."""
        self.work: dict[str, Work] = {}
        """What was computed, by request."""
        self.is_silent = False
        """Whether it does not say that a request was aborted."""
        self.refusal: ErrorInfo | None = None
        """Answer every request with this error, at once or after `refusal_after` tokens."""
        self.refusal_after = 0
        self.failure_after: int | None = None
        """Die after so many tokens."""
        self.residents: list[ResidentAdapter] = []
        self.tenants: dict[str, TenantLoad] = {}
        self.page_map = PageMap(pages_per_cell=1, uses=[PageUse(kind="free")], runs=[(10, 0)])
        self.batches = StepBatches(adapters=[], steps=[[1, 1, 0]])
        self.num_asked = 0
        """How often for its status."""
        self.requests: list[GenerationRequest] = []
        self.running: set[str] = set()
        self.aborted: list[str] = []
        self._aborts: dict[str, asyncio.Event] = {}
        self.dropped: list[str] = []
        self.pinned: set[str] = set()
        self.taken: dict[str, tuple[AdapterRef, bytes]] = {}
        """Weights that are in no store, by their digest."""
        self.told_pins: list[tuple[AdapterRef, bool]] = []
        self.paused: PauseMode | None = None
        self.cached_pages = 0

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[RequestOutput, None]:
        self.requests.append(request)
        if self.ready is None:
            raise EngineUnavailableError("The engine restarts.", retry_after_s=2)
        refusal, failure_after = self.refusal, self.failure_after
        if refusal is not None and not self.refusal_after:
            yield RequestOutput(request_id=request.request_id, finish_reason="error", error=refusal)
            return
        self.running.add(request.request_id)
        abort = self._aborts[request.request_id] = asyncio.Event()
        work = self.work[request.request_id] = Work()
        has_ended = False
        try:
            async with aclosing(self._turns(request, work, abort)) as outputs:
                async for output in outputs:
                    if failure_after is not None and work.output_tokens > failure_after:
                        has_ended = True
                        work.lose(output, is_dead=True)
                        raise EngineUnavailableError(
                            "The engine died under this request.", retry_after_s=1
                        )
                    if refusal is not None and work.output_tokens > self.refusal_after:
                        has_ended = True
                        work.lose(output, is_dead=False)
                        yield RequestOutput(
                            request_id=request.request_id,
                            finish_reason="error",
                            error=refusal,
                            cached_tokens=output.cached_tokens,
                            computed_prompt_tokens=work.prompt_tokens,
                        )
                        return
                    has_ended = output.finish_reason not in (None, "abort")
                    yield output
        finally:
            self.running.discard(request.request_id)
            del self._aborts[request.request_id]
            if not has_ended:
                self.aborted.append(request.request_id)

    def abort(self, request_id: str) -> None:
        if request_id in self._aborts:
            self._aborts[request_id].set()

    async def _turns(
        self, request: GenerationRequest, work: Work, abort: asyncio.Event
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs as they are computed; the prompt first, in chunks. The first turn is the wait in the queue."""
        num_prompt, outputs = len(request.prompt_token_ids), self._outputs(request)
        while outputs:
            await self.turn(request, abort)
            if abort.is_set():
                is_first = not work.output_tokens
                yield RequestOutput(
                    request_id=request.request_id,
                    finish_reason="abort",
                    cached_tokens=outputs[0].cached_tokens
                    if is_first and work.prompt_tokens
                    else 0,
                    computed_prompt_tokens=work.prompt_tokens,
                )
                return
            start = work.prompt_tokens or min(outputs[0].cached_tokens, num_prompt - 1)
            work.prompt_tokens = min(start + (self.chunk_tokens or num_prompt), num_prompt)
            if work.prompt_tokens == num_prompt:
                work.output_tokens += len(outputs[0].token_ids)
                yield outputs.pop(0)

    async def turn(self, request: GenerationRequest, abort: asyncio.Event) -> None:  # noqa: ARG002 - for heirs
        """Wait as long as a step takes, or until the request is aborted."""
        if self.is_silent or not self.token_s:
            await asyncio.sleep(self.token_s)
            if self.is_silent:
                abort.clear()
            return
        with suppress(TimeoutError):
            await asyncio.wait_for(abort.wait(), self.token_s)

    def _outputs(self, request: GenerationRequest) -> list[RequestOutput]:
        """One token each; of a beam search all at once, as many sequences as it is wide."""
        if request.beam is None:
            return self._written(request)
        hypotheses = []
        for index in range(request.beam.width):
            parts = self._written(replace(request, beam=None, choice_index=index))
            facts = parts[0] if index == 0 else RequestOutput(request_id=request.request_id)
            hypotheses.append(
                replace(
                    parts[-1],
                    token_ids=[token for output in parts for token in output.token_ids],
                    logprobs=[entry for output in parts for entry in output.logprobs or ()] or None,
                    adapter_state=facts.adapter_state,
                    queue_s=facts.queue_s,
                    cached_tokens=facts.cached_tokens,
                )
            )
        reason = hypotheses[0].finish_reason
        return [
            RequestOutput(
                request_id=request.request_id, finish_reason=reason, hypotheses=hypotheses
            )
        ]

    def _written(self, request: GenerationRequest) -> list[RequestOutput]:
        params, tokenizer = request.params, demo_tokenizer()
        eos = min(tokenizer.eos_token_ids)
        tokens = [*tokenizer.encode(self.write(request), add_special_tokens=False), eos]
        stops = {*params.stop_token_ids, *(() if params.ignore_eos else (eos,))}
        while params.ignore_eos and len(tokens) < params.max_tokens:
            tokens += tokens
        outputs = []
        for index, token in enumerate(tokens[: params.max_tokens] or [None]):
            is_stop = token in stops
            is_last = index + 1 >= params.max_tokens
            outputs.append(
                RequestOutput(
                    request_id=request.request_id,
                    token_ids=[] if token is None else [token],
                    logprobs=self._logprobs(request, token),
                    finish_reason="stop" if is_stop else "length" if is_last else None,
                    stop_token_id=token if is_stop else None,
                    computed_prompt_tokens=len(request.prompt_token_ids)
                    if is_stop or is_last
                    else 0,
                )
            )
            if is_stop:
                break
        prompt_logprobs = None
        if params.prompt_logprobs is not None:
            entries = [
                _entry(token, params.prompt_logprobs, -0.25)
                for token in request.prompt_token_ids[1:]
            ]
            prompt_logprobs = [None, *entries]
        state: AdapterState = "base" if request.adapter is None else "stored"
        outputs[0] = replace(
            outputs[0],
            prompt_logprobs=prompt_logprobs,
            adapter_state=state,
            queue_s=0.001,
            cached_tokens=self.cached(request),
        )
        return outputs

    def _logprobs(
        self, request: GenerationRequest, token: int | None
    ) -> list[TokenLogprobs] | None:
        if request.params.logprobs is None or token is None:
            return None
        return [_entry(token, request.params.logprobs, self.logprob(request))]

    async def status(self, *, is_detailed: bool = False) -> EngineStatus:
        self.num_asked += 1
        if self.ready is None:
            raise EngineUnavailableError("The engine restarts.")
        return EngineStatus(
            boot_id=self.ready.boot_id,
            running=len(self.running),
            waiting=sum(load.waiting for load in self.tenants.values()),
            pause=self.paused,
            waiting_reasons=dict(
                sum((Counter(load.reasons) for load in self.tenants.values()), Counter())
            ),
            tenants=dict(self.tenants),
            pages={"free": 10, "kv": 0, "prefix": self.cached_pages, "adapter": 0, "quarantine": 0},
            available_pages=10 + self.cached_pages,
            residents=list(self.residents),
            last_steps=[
                StepStats(
                    step=1,
                    seconds=0.01,
                    requests=1,
                    tokens=1,
                    prefill_tokens=0,
                    adapters=1,
                    base_requests=0,
                )
            ],
            preemptions={"recompute": 4, "swap": 1},
            loads={"stored>device:ok": 3},
            load_seconds=0.5,
            load_p95_s={"stored>device": 0.25},
            evictions={"adapter": 2, "prefix": 7},
            prefix_queries=100,
            prefix_hits=25,
            kernel_compiles=2,
            host_pages={"free": 1, "adapter": 0, "kv": 0},
            page_map=self.page_map if is_detailed else None,
            batches=self.batches if is_detailed else None,
        )

    @property
    def is_paused(self) -> bool:
        return self.paused is not None

    def pause(self, mode: PauseMode, *, is_ending: bool = False) -> None:
        if self.ready is None:
            raise EngineUnavailableError("The engine restarts.")
        self.paused = mode
        for request_id in list(self._aborts) if is_ending else ():
            self.abort(request_id)

    def resume(self) -> None:
        self.paused = None

    def reset_prefix_cache(self) -> None:
        if self.ready is None:
            raise EngineUnavailableError("The engine restarts.")
        self.cached_pages = 0

    async def drop_adapter(self, digest: str) -> None:
        self.dropped.append(digest)
        self.pinned.discard(digest)

    def uses(self, weights_sha256: str) -> bool:
        return any(
            request.adapter is not None and request.adapter.weights_sha256 == weights_sha256
            for request in self.requests
            if request.request_id in self.running
        )

    async def take_weights(self, ref: AdapterRef, place: MemoryPlace) -> None:
        self.taken[ref.weights_sha256] = (ref, Path(place.path).read_bytes())  # noqa: ASYNC240 - it is memory

    async def drop_weights(self, weights_sha256: str) -> None:
        del self.taken[weights_sha256]

    async def pin_adapter(self, ref: AdapterRef, is_pinned: bool) -> None:
        (self.pinned.add if is_pinned else self.pinned.discard)(ref.digest)
        self.told_pins.append((ref, is_pinned))


def _entry(token: int, num_top: int, logprob: float) -> TokenLogprobs:
    others = [other for other in range(10, 10 + num_top) if other != token][: max(0, num_top - 1)]
    return TokenLogprobs(
        token_id=token,
        logprob=logprob,
        rank=1,
        top_ids=[token, *others][:num_top],
        top_logprobs=[logprob, *(float("-inf") for _ in others)][:num_top],
    )
