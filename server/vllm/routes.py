"""Routes of a vLLM server that trainers and evaluations call besides tokens, with vLLM's answers. Admins only.

A pause is of the server's process: a restarted engine stays paused, a restarted server does not.
"""

from __future__ import annotations

import asyncio
import platform
from importlib.metadata import version
from typing import Any, Literal

import structlog
from fastapi import APIRouter

import manylora
from manylora.engine.status import PauseMode
from manylora.errors import ConflictError
from manylora.server.auth.callers import Admin
from manylora.server.http.bodies import View
from manylora.server.services import Services, Wired
from manylora.server.vllm import PAUSE, RESET_PREFIX_CACHE, RESUME

log = structlog.get_logger("manylora.server")
router = APIRouter(tags=["vllm"])
LOOK_S = 0.05
"""Seconds between two looks whether all that had started has ended."""
WORLD_SIZE = 1
"""One engine process computes on one device."""


class StatusView(View):
    """Answer of POST /pause and /resume."""

    status: Literal["paused", "resumed"]


class IsPausedView(View):
    """Answer of GET /is_paused."""

    is_paused: bool


class ResetView(View):
    """Answer of POST /reset_prefix_cache."""

    success: bool
    """True if nothing is cached any more; requests that run keep what they use."""


class WorldSizeView(View):
    """Answer of GET /get_world_size."""

    world_size: int


class ServerInfoView(View):
    """Answer of GET /server_info."""

    vllm_config: dict[str, Any] | str
    """The server's settings by vLLM's names: an object, or text."""
    vllm_env: dict[str, str]
    """Empty: vLLM's variables mean nothing here."""
    system_env: dict[str, str]


@router.post(PAUSE.path)
async def pause(
    services: Wired, admin: Admin, mode: Literal["abort", "wait", "keep"] = "abort"
) -> StatusView:
    """Have the engine compute nothing until it is resumed; requests are taken, and wait.

    `keep` keeps running requests as they are, `wait` answers when they have ended, and `abort` ends all requests with
    503. A request's own deadline counts all the same.
    """
    services.engine.pause("wait" if mode == "wait" else "keep", is_ending=mode == "abort")
    services.limits.gate.pause(True)
    log.warning("engine_paused", mode=mode, by=admin.key_id or admin.role)
    state: PauseMode | None = "wait"
    with services.drain.cancelling():
        while state == "wait":
            state = (await services.engine_status()).pause
            await asyncio.sleep(LOOK_S if state == "wait" else 0)
    if state is None:
        raise ConflictError(
            "The engine was resumed while it waited for running requests to end.", code="resumed"
        )
    return StatusView(status="paused")


@router.post(RESUME.path)
async def resume(services: Wired, admin: Admin) -> StatusView:
    """Have the engine go on."""
    services.engine.resume()
    services.limits.gate.pause(False)
    log.warning("engine_resumed", by=admin.key_id or admin.role)
    return StatusView(status="resumed")


@router.get("/is_paused")
async def is_paused(services: Wired, _: Admin) -> IsPausedView:
    """Tell whether the engine is paused."""
    return IsPausedView(is_paused=services.engine.is_paused)


@router.post(RESET_PREFIX_CACHE.path)
async def reset_prefix_cache(services: Wired, _: Admin) -> ResetView:
    """Forget the cached KV that no request uses. No answer depends on it: versions of adapters never change."""
    services.engine.reset_prefix_cache()
    return ResetView(success=not (await services.engine_status()).pages.get("prefix", 0))


@router.get("/get_world_size")
async def get_world_size(_: Admin) -> WorldSizeView:
    """Tell how many devices compute a step."""
    return WorldSizeView(world_size=WORLD_SIZE)


@router.get("/server_info")
async def server_info(
    services: Wired, _: Admin, config_format: Literal["text", "json"] = "text"
) -> ServerInfoView:
    """Tell what the server is."""
    config = _config(services)
    versions = {"manylora_version": manylora.__version__, "torch_version": version("torch")}
    system = {**versions, "os": platform.platform(), "python_version": platform.python_version()}
    shown = config if config_format == "json" else str(config)
    return ServerInfoView(vllm_config=shown, vllm_env={}, system_env=system)


def _config(services: Services) -> dict[str, Any]:
    ready = services.ready
    memory = ready.memory
    scheduler = services.config.scheduler
    model = {"model": ready.model_path, "served_model_name": services.served_name}
    limits = {
        "max_model_len": ready.max_model_len,
        "max_logprobs": services.config.server.max_logprobs,
    }
    return {
        "model_config": {**model, "dtype": ready.dtype, **limits},
        "lora_config": {"max_loras": memory.slots, "max_lora_rank": ready.max_rank},
        "cache_config": {
            "block_size": ready.geometry.page_tokens,
            "cache_dtype": services.config.memory.kv_dtype,
            "num_gpu_blocks": memory.num_pages,
            "enable_prefix_caching": services.config.memory.prefix_cache,
        },
        "scheduler_config": {
            "max_num_seqs": scheduler.max_running,
            "max_num_batched_tokens": memory.step_tokens,
        },
        "parallel_config": {"world_size": WORLD_SIZE},
        "device_config": {"device": ready.device},
    }
