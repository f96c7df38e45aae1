"""The tokenizer over HTTP, with vLLM's routes: clients need no tokenizer of their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import orjson
from fastapi import APIRouter, Request
from pydantic import Field, model_validator
from starlette.responses import JSONResponse, Response

from manylora.errors import InvalidRequestError
from manylora.server.auth.admission import TokenizingCaller, reservation_of
from manylora.server.auth.callers import Caller
from manylora.server.core_services import Core, CoreServices
from manylora.server.generation import unsupported_params
from manylora.server.generation.chat_schemas import MAX_MESSAGES, Message, ToolsBody
from manylora.server.generation.prompts import check_text, render_job
from manylora.server.http.bodies import Body, Token, View
from manylora.server.http.body import held_body
from manylora.server.http.openapi import OBJECT, sends, takes
from manylora.server.process.threads import BYTES_PER_CHARACTER

router = APIRouter(tags=["tokens"])
ResultT = TypeVar("ResultT")


class TokenizeView(View):
    """Answer of POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeView(View):
    """Answer of POST /detokenize."""

    prompt: str


class TokenizeBody(ToolsBody):
    """Body of POST /tokenize: a prompt, or a chat."""

    takes_nul = True
    ignored = unsupported_params.IGNORED
    neutral_values = unsupported_params.TOKENIZE

    model: str | None = Field(None, min_length=1, max_length=512)
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
    add_special_tokens: bool | None = None
    """Begin with the model's start token: true for a prompt, and false for a chat, whose template brings its own."""
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequestError("Send either prompt or messages.", param="prompt")
        return self


class DetokenizeBody(Body):
    """Body of POST /detokenize."""

    model: str | None = Field(None, min_length=1, max_length=512)
    tokens: list[Token]


@router.post("/tokenize", response_model=TokenizeView, openapi_extra=takes(TokenizeBody))
async def tokenize(request: Request, services: Core, caller: TokenizingCaller) -> Response:
    """Turn a prompt or a chat into token ids."""
    body = await services.bodies.json(request, TokenizeBody)
    await _check_model(services, caller, body.model)
    text = body.prompt or ""
    if body.messages is not None:
        text = await rendered_chat(request, caller, partial(render_job, body, body.messages))
    answer = await unbilled(request, caller, partial(_tokenized, services, body, text))
    return Response(answer, media_type="application/json")


@router.post("/detokenize", response_model=DetokenizeView, openapi_extra=takes(DetokenizeBody))
async def detokenize(request: Request, services: Core, caller: TokenizingCaller) -> Response:
    """Turn token ids into text."""
    body = await services.bodies.json(request, DetokenizeBody)
    await _check_model(services, caller, body.model)
    if max(body.tokens, default=0) >= services.ready.vocab_size:
        raise InvalidRequestError(
            f"The ids in tokens must be at most {services.ready.vocab_size - 1}.", param="tokens"
        )
    answer = await unbilled(request, caller, partial(_detokenized, services, body))
    return Response(answer, media_type="application/json")


async def unbilled(
    request: Request, caller: Caller, work: Callable[[], tuple[int, ResultT]]
) -> ResultT:
    """Tokenize a body for a caller who does not generate; the tokens, which `work` returns first, count in the minute.

    Raises:
        RateLimitError: The tokens of the minute are used up when its turn comes.
    """
    num_bytes = BYTES_PER_CHARACTER * held_body(request).num_bytes
    begin = reservation_of(request).check_minute
    services: CoreServices = request.app.state.services
    count, result = await services.bodies.long_work.run(
        work, num_bytes, caller.tenant_id, caller.weight, begin
    )
    reservation_of(request).spend(count)
    return result


async def rendered_chat(request: Request, caller: Caller, job: Callable[[], dict[str, Any]]) -> str:
    """A chat of a caller who does not generate, as the model reads it; `job` makes what `ChatRenderer.render` takes."""
    services: CoreServices = request.app.state.services
    num_bytes = held_body(request).num_bytes
    made = await services.bodies.long_work.run(job, num_bytes, caller.tenant_id, caller.weight)
    return await services.chats.render(made, num_bytes)


@router.get(
    "/tokenizer_info", response_class=JSONResponse, responses=sends("application/json", OBJECT)
)
async def tokenizer_info(services: Core, _: TokenizingCaller) -> Response:
    """Show the tokenizer's settings."""
    return JSONResponse(services.tokenizer.settings)


async def _check_model(services: CoreServices, caller: Caller, model: str | None) -> None:
    """All adapters share the base's tokenizer; a name must still exist."""
    if model is not None:
        await services.models.resolve(caller.tenant_id, model)


def _tokenized(services: CoreServices, body: TokenizeBody, text: str) -> tuple[int, bytes]:
    """The number of tokens, and the answer in JSON, which takes as long to write as to tokenize."""
    tokenizer = services.tokenizer
    is_chat = body.messages is not None
    check_text(text, services)
    begins = not is_chat if body.add_special_tokens is None else body.add_special_tokens
    tokens = tokenizer.encode(text, add_special_tokens=begins)
    texts = [tokenizer.token_text(token) for token in tokens] if body.return_token_strs else None
    view = {
        "count": len(tokens),
        "max_model_len": services.ready.max_model_len,
        "tokens": tokens,
        "token_strs": texts,
    }
    return len(tokens), orjson.dumps(view)


def _detokenized(services: CoreServices, body: DetokenizeBody) -> tuple[int, bytes]:
    return len(body.tokens), orjson.dumps({"prompt": services.tokenizer.decode(body.tokens)})
