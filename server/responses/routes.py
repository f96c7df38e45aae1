"""POST /v1/responses; lines of batches are planned here too."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request

from manylora.server.admission.rates import GeneratingCaller
from manylora.server.generation.items import named
from manylora.server.generation.meter import Origin
from manylora.server.generation.response import PlannedGeneration
from manylora.server.generation.routes import GenerationRoute, plan_generation, post, received
from manylora.server.http.json_body import validate
from manylora.server.responses.chat import NAMES, ResponsesChat, chat_of
from manylora.server.responses.schemas import ResponsesBody, ResponseView
from manylora.server.responses.writer import ResponseWriter

router = APIRouter(tags=["generation"], route_class=GenerationRoute)


@post(router, "/v1/responses", ResponsesBody, ResponseView)
async def respond(request: Request, caller: GeneratingCaller) -> PlannedGeneration:
    """Answer a conversation item by item; nothing is stored."""
    return await plan_response(*await received(request, caller, ResponsesBody))


async def plan_response(origin: Origin, body: ResponsesBody) -> PlannedGeneration:
    """Like `plan_generation`."""
    with named(NAMES):
        chat = await origin.work(lambda: validate(ResponsesChat, chat_of(body)), origin.num_bytes)
        return await plan_generation(origin, chat, partial(ResponseWriter, body))
