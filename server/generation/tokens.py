"""The tokenizer over HTTP, with vLLM's routes: clients need no tokenizer of their own."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from pydantic import Field, model_validator
from starlette.responses import JSONResponse, Response

from manylora.errors import InvalidRequestError
from manylora.server.auth.callers import Caller
from manylora.server.generation import unsupported_params
from manylora.server.generation.chat_schemas import MAX_MESSAGES, Message, ToolsBody
from manylora.server.generation.prompts import as_tools, as_turn
from manylora.server.http.bodies import Body, Token, View
from manylora.server.http.json_body import json_body
from manylora.server.http.openapi import OBJECT, sends, takes
from manylora.server.limits.rates import TokenizingCaller
from manylora.server.model_name import resolve_model
from manylora.server.services import Services, Wired

router = APIRouter(tags=["tokens"])


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


@router.post("/tokenize", openapi_extra=takes(TokenizeBody))
async def tokenize(request: Request, services: Wired, caller: TokenizingCaller) -> TokenizeView:
    """Turn a prompt or a chat into token ids."""
    body = await json_body(request, TokenizeBody, services.config.server.max_body_bytes, services.pace)
    await _check_model(services, caller, body.model)
    tokens = await asyncio.to_thread(_encode, services, body)
    texts = [services.tokenizer.token_text(token) for token in tokens] if body.return_token_strs else None
    return TokenizeView(count=len(tokens), max_model_len=services.ready.max_model_len, tokens=tokens, token_strs=texts)


@router.post("/detokenize", openapi_extra=takes(DetokenizeBody))
async def detokenize(request: Request, services: Wired, caller: TokenizingCaller) -> DetokenizeView:
    """Turn token ids into text."""
    body = await json_body(request, DetokenizeBody, services.config.server.max_body_bytes, services.pace)
    await _check_model(services, caller, body.model)
    if max(body.tokens, default=0) >= services.ready.vocab_size:
        raise InvalidRequestError(f"The ids in tokens must be at most {services.ready.vocab_size - 1}.", param="tokens")
    return DetokenizeView(prompt=await asyncio.to_thread(services.tokenizer.decode, body.tokens))


@router.get("/tokenizer_info", response_class=JSONResponse, responses=sends("application/json", OBJECT))
async def tokenizer_info(services: Wired, _: TokenizingCaller) -> Response:
    """Show the tokenizer's settings."""
    return JSONResponse(services.tokenizer_settings)


async def _check_model(services: Services, caller: Caller, model: str | None) -> None:
    """All adapters share the base's tokenizer; a name must still exist."""
    if model is not None:
        await resolve_model(services, caller, model)


def _encode(services: Services, body: TokenizeBody) -> list[int]:
    if body.messages is not None:
        turns, kwargs = [as_turn(message) for message in body.messages], body.chat_template_kwargs
        rendered = services.tokenizer.render_chat(turns, as_tools(body.tools), kwargs, **body.template_options)
        return services.tokenizer.encode(rendered, add_special_tokens=body.add_special_tokens or False)
    return services.tokenizer.encode(body.prompt or "", add_special_tokens=body.add_special_tokens is not False)
