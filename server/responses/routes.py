"""POST /v1/responses."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter

from manylora.server.generation.routes import post
from manylora.server.generation.run import GenerationRun
from manylora.server.http.json_body import named, validate
from manylora.server.responses import RESPONSES
from manylora.server.responses.chat import NAMES, ResponsesChat, chat_of
from manylora.server.responses.schemas import ResponsesBody, ResponseView
from manylora.server.responses.writer import ResponseWriter

router = APIRouter()


@post(router, RESPONSES, ResponsesBody, ResponseView)
async def respond(run: GenerationRun, body: ResponsesBody) -> None:
    """Answer a conversation item by item; nothing is stored."""
    with named(NAMES):
        chat = await run.work(lambda: validate(ResponsesChat, chat_of(body)), run.num_bytes)
        await run.prepare(chat, partial(ResponseWriter, body))
