"""Routes for trainers: push the bytes of a version in one request; load and unload a folder, as with vLLM."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import PlainTextResponse

from weft.server.adapters.push import CONFIG_HEADER, MAX_TTL_S, life_of, load_folder, receive_push
from weft.server.adapters.routes import PUBLISHES
from weft.server.adapters.schemas import LoadBody, UnloadBody
from weft.server.adapters.upload_guards import answered
from weft.server.auth.callers import TenantWriter
from weft.server.garbage import remove_unreferenced
from weft.server.http.json_body import json_body
from weft.server.http.openapi import error_answer, takes, takes_bytes
from weft.server.services import Wired

router = APIRouter(tags=["adapters"])
NOT_SERVED: dict[int | str, dict[str, Any]] = {422: error_answer(422, "/v1/adapters")}


@router.put(
    "/v1/adapters/{name}/versions:push",
    openapi_extra=takes_bytes(CONFIG_HEADER, "adapter_config.json in base64; a push without it is refused."),
    **{**PUBLISHES, "responses": {**PUBLISHES["responses"], **NOT_SERVED}},
)
async def push_version(  # noqa: PLR0913 - one parameter per option
    name: str,
    request: Request,
    services: Wired,
    caller: TenantWriter,
    ephemeral: bool = False,
    keep: Annotated[int | None, Query(ge=1, le=1000)] = None,
    ttl_s: Annotated[int | None, Query(ge=1, le=MAX_TTL_S)] = None,
    activate: bool = True,
) -> Response:
    """Publish a version from adapter_model.safetensors as the body.

    With `ephemeral=true` its weights stay in this server's memory: it goes with the server, after `ttl_s` seconds, or
    when `keep` newer ones are there. Requests that run with it finish.
    """
    life = life_of(services, ephemeral=ephemeral, keep=keep, ttl_s=ttl_s)
    return answered(await receive_push(request, services, caller, name, life, activate))


@router.post(
    "/v1/load_lora_adapter", openapi_extra=takes(LoadBody), response_class=PlainTextResponse, responses=NOT_SERVED
)
async def load_lora_adapter(request: Request, services: Wired, caller: TenantWriter) -> Response:
    """Publish an adapter from a folder of the server's machine as an ephemeral version, as vLLM loads it."""
    body = await json_body(request, LoadBody, services.config.server.max_body_bytes, services.pace)
    await load_folder(services, caller, body.lora_name, body.lora_path)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter", openapi_extra=takes(UnloadBody), response_class=PlainTextResponse)
async def unload_lora_adapter(request: Request, services: Wired, caller: TenantWriter) -> Response:
    """Withdraw all ephemeral versions of an adapter; requests that run with them finish."""
    body = await json_body(request, UnloadBody, services.config.server.max_body_bytes, services.pace)
    removed = await services.registry.ephemeral.unload(caller.tenant_id, body.lora_name, caller.actor)
    await remove_unreferenced(services, removed)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
