"""One request for a generation, from its arrival to its bill: each stage is a method, in the order of their work."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from starlette.requests import ClientDisconnect

from manylora.engine.request import FlowKey
from manylora.errors import CapacityError, RequestError
from manylora.registry.records import ResolvedModel
from manylora.server.auth.callers import Caller
from manylora.server.core_services import CoreServices
from manylora.server.generation.chat_schemas import ChatBody
from manylora.server.generation.choices import Generation, choices_of
from manylora.server.generation.item_writer import ItemWriter
from manylora.server.generation.meter import Meter
from manylora.server.generation.openai_format import (
    ChatAnswer,
    CompletionAnswer,
    JsonObject,
    OpenAIAnswer,
)
from manylora.server.generation.prompts import Prompts, chat_job, prompts_of
from manylora.server.generation.schemas import CompletionBody
from manylora.server.generation.structured_output import checked_grammar
from manylora.server.hop import Hop
from manylora.server.limits.gate import Admission
from manylora.server.limits.prediction import AdmissionRequest
from manylora.server.limits.reservation import LimitReservation
from manylora.server.process.threads import BYTES_PER_CHARACTER, INLINE_BYTES

AnyBody = ChatBody | CompletionBody
WriterOfAnswer = Callable[[Meter, JsonObject], ItemWriter]
"""Makes the writer of an answer in items: of the tokens delivered, and `created`, `model` and `system_fingerprint`."""
OPEN_TOKENS = 1024
"""Reserved first per choice if the client gives no length. A whole context would leave nothing to others."""
ResultT = TypeVar("ResultT")


@dataclass(slots=True, kw_only=True, eq=False)
class GenerationRun:
    """One request. It takes things onto `ends`, whose owner closes that at the request's end: all are given back."""

    services: CoreServices
    caller: Caller
    reservation: LimitReservation
    """Admitted, nothing reserved; `ends` ends it."""
    ends: AsyncExitStack
    endpoint: str
    request_id: str
    session: str | None = None
    num_bytes: int
    """Length of the body."""
    digest: int = 0
    """Hash of the key and the body: the same when a client sends a request again."""
    deadline_s: float | None = None
    """Seconds within which the client wants the first token."""
    hop: Hop | None = None
    """Set if a gateway passed it on."""
    line_id: str | None = None
    """Ledger id of a line of a batch. Such a request does not pass the gate."""
    body: AnyBody = field(init=False)
    model: ResolvedModel = field(init=False)
    admission: Admission | None = field(init=False, default=None)
    generation: Generation = field(init=False)
    meter: Meter = field(init=False)
    openai: OpenAIAnswer = field(init=False)
    """Makes the parts of the answer."""
    writer: OpenAIAnswer | ItemWriter = field(init=False)
    unbilled_status: str | None = field(init=False, default=None)
    """Status under which the end bills a request that is not billed by then; None bills nothing."""

    async def prepare(self, body: AnyBody, writer: WriterOfAnswer | None = None) -> None:
        """Do all that comes before the engine is asked.

        Args:
            body: The chat or the completion.
            writer: Makes the writer of the answer; None writes OpenAI's completions and chats.

        Raises:
            RequestError: The body asks for what cannot be; the model is missing; a limit is reached.
            CapacityError: It would wait too long.
        """
        self.body = body
        self.model = await self._resolve()
        self._admit()
        prompts = await self._tokenise()
        await self._reserve(prompts)
        self._set_up(prompts, writer)

    async def _resolve(self) -> ResolvedModel:
        services = self.services
        body = self.body
        given = body.user or self.session or secrets.token_hex(8)
        sticky = self.hop.sticky if self.hop else given
        model = await services.models.resolve(
            self.caller.tenant_id, body.model, body.adapter_id, sticky=sticky
        )
        if model.adapter is not None and model.version is not None:
            services.metrics.learn_adapter(
                model.version.digest, model.adapter.tenant, model.adapter.name, model.version.rank
            )
            if model.version.held_by is not None:
                self.ends.callback(services.hold_weights(model, services.clock.now()))
        return model

    def _admit(self) -> None:
        """Let it through the gate, where it must pass that."""
        if self.line_id is not None:
            return
        services = self.services
        body = self.body
        limit = services.ready.max_model_len if body.token_limit is None else body.token_limit
        num_prompts = len(body.prompt) if isinstance(body, CompletionBody) else 1
        with self.reservation.refusing():
            self.admission = services.limits.gate.admit(
                AdmissionRequest(
                    tenant=self.caller.tenant_id or "",
                    name=self.caller.tenant,
                    weight=self.caller.weight,
                    adapter=self.model.ref.digest if self.model.ref else None,
                    num_bytes=self.num_bytes,
                    num_choices=body.num_candidates * num_prompts,
                    max_tokens=limit,
                    deadline_s=self.deadline_s,
                    key=self.digest,
                )
            )
        self.ends.callback(self.admission.end)

    async def _tokenise(self) -> Prompts:
        services = self.services
        body = self.body
        num_bytes = self.num_bytes
        rendered = ""
        if body.grammar_params or (isinstance(body, ChatBody) and body.tools):
            num_bytes = max(num_bytes, INLINE_BYTES)  # schemas take long for their size
        if isinstance(body, ChatBody):
            job = await self.work(partial(chat_job, body, services), num_bytes)
            rendered = await services.chats.render(job, num_bytes)
        prompts = await self.work(
            partial(prompts_of, body, services, rendered), BYTES_PER_CHARACTER * num_bytes
        )
        if prompts.wanted is not None:
            tenant = self.caller.tenant_id or ""
            prompts.grammar = await checked_grammar(prompts.wanted, services.grammars, tenant)
        return prompts

    async def _reserve(self, prompts: Prompts) -> None:
        """Take its tokens from its limits before the engine sees it."""
        is_open = self.body.token_limit is None
        limit = prompts.params.max_tokens
        count = self.body.num_candidates * len(prompts.prompts)
        tokens = prompts.num_tokens + count * (min(limit, OPEN_TOKENS) if is_open else limit)
        if is_open:
            tokens = self.reservation.wanted(prompts.num_tokens + count, tokens)
        await self.services.limits.accounts.secure(self.reservation.accounts, tokens=tokens)
        self.reservation.reserve(tokens, is_open=is_open)

    def _set_up(self, prompts: Prompts, writer: WriterOfAnswer | None) -> None:
        services = self.services
        body = self.body
        given_id = self.hop.ledger_id if self.hop else self.line_id
        ledger_id = given_id or services.ledger.mint_id()
        is_line = self.line_id is not None
        event = partial(
            self.model.usage_event(
                self.caller.identity,
                self.caller.tenant_id,
                self.caller.tenant,
                self.request_id,
                self.endpoint,
            ),
            id=ledger_id,
            service_class="batch" if is_line else "interactive",
        )
        self.meter = Meter(
            services, self.reservation, self.model, event, is_interactive=not is_line
        )
        if self.hop is not None:
            self.hop.billed = self.meter.counts
        flow = FlowKey(
            lane=int(is_line),
            tenant=self.caller.tenant_id or "",
            weight=self.caller.weight,
            priority=body.priority,
            deadline_s=self.deadline_s,
        )
        choices = choices_of(body, prompts, services.tokenizer, ledger_id, self.model.ref, flow)
        num_prompt = prompts.num_tokens
        self.generation = Generation(
            services.engine,
            choices,
            lambda num_output: self.reservation.grow(num_prompt + num_output),
            self.admission,
        )
        head: JsonObject = {
            "created": int(services.clock.now().timestamp()),
            "model": self.model.name,
            "system_fingerprint": services.fingerprint,
        }
        self.openai = (
            ChatAnswer(body, services.tokenizer, self.meter, head)
            if isinstance(body, ChatBody)
            else CompletionAnswer(body, services.tokenizer, self.meter, head)
        )
        self.writer = writer(self.meter, head) if writer else self.openai

    @asynccontextmanager
    async def generating(self) -> AsyncIterator[None]:
        """Have the engine compute. An error that ends the block early decides what its tokens cost."""
        self.unbilled_status = "error" if self.line_id is None else None
        self.ends.push_async_callback(self._bill_at_end)
        async with self.generation:
            try:
                yield
            except ClientDisconnect:
                self.unbilled_status = "aborted"
                await self.take_computed()
                raise
            except RequestError:
                await self.take_computed()
                raise
            except CapacityError:
                if self.hop is not None:  # the gateway asks another server
                    self.unbilled_status = None
                raise

    async def take_computed(self) -> None:
        """End what still runs, and count the tokens computed instead of those delivered."""
        await self.generation.abort()
        self.meter.take_computed(self.generation.choices)

    async def _bill_at_end(self) -> None:
        if self.unbilled_status is not None:
            await asyncio.shield(self.meter.finish_quietly(self.unbilled_status))

    async def work(self, function: Callable[[], ResultT], num_bytes: int) -> ResultT:
        """Run a function that reads `num_bytes` bytes of the request; see `LongWork.run`."""
        return await self.services.bodies.long_work.run(
            function, num_bytes, self.caller.tenant_id, self.caller.weight
        )
