"""POST /v1/responses."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request

from weft.server.generation.items import named
from weft.server.generation.response import PlannedGeneration
from weft.server.generation.routes import STREAM, GenerationRoute, off_loop, plan_generation, received
from weft.server.http.json_body import validate
from weft.server.http.openapi import takes
from weft.server.limits.rates import GeneratingCaller
from weft.server.responses.chat import NAMES, ResponsesChat, chat_of
from weft.server.responses.schemas import ResponsesBody, ResponseView
from weft.server.responses.writer import ResponseWriter

router = APIRouter(tags=["generation"], route_class=GenerationRoute)


@router.post(
    "/v1/responses",
    response_model=None,
    responses={200: {"model": ResponseView, "content": STREAM}},
    openapi_extra=takes(ResponsesBody),
)
async def respond(request: Request, caller: GeneratingCaller) -> PlannedGeneration:
    """Answer a conversation item by item; nothing is stored."""
    origin, body = await received(request, caller, ResponsesBody)
    with named(NAMES):
        chat = await off_loop(lambda: validate(ResponsesChat, chat_of(body)), origin.num_bytes)
        return await plan_generation(origin, chat, partial(ResponseWriter, body))
