"""Which model a request means: the base by its served name, or an adapter version of the caller's tenant.

An adapter may stand behind a name of the base and a colon, as some clients of vLLM write it: `base:name@alias`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from manylora.adapters.ref import AdapterRef
from manylora.errors import AdapterUnavailableError, InvalidRequestError, NotFoundError
from manylora.registry.names import DEFAULT_ALIAS, model_not_found, parse_selector
from manylora.registry.records import AdapterIdentity, AdapterVersion
from manylora.server.auth.callers import Caller
from manylora.server.services import Services

if TYPE_CHECKING:
    from manylora.registry.registry import Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedModel:
    """The model that `model` and `adapter_id` name."""

    name: str
    """What the client sent as `adapter_id`, or else as `model`; echoed in the response."""
    adapter: AdapterIdentity | None = None
    """None is the base."""
    version: AdapterVersion | None = None

    def __post_init__(self) -> None:
        if (self.adapter is None) != (self.version is None):
            raise ValueError(
                "an adapter is resolved with its version: without one it would be taken for the base"
            )

    @property
    def ref(self) -> AdapterRef | None:
        """The reference for the engine; None is the base."""
        return self.adapter.ref(self.version) if self.adapter and self.version else None

    @property
    def headers(self) -> dict[str, str]:
        """Response headers that tell which version answered."""
        if self.adapter is None or self.version is None:
            return {}
        return {
            "x-manylora-adapter": f"{self.adapter.tenant}/{self.adapter.name}@{self.version.version}",
            "x-manylora-adapter-digest": self.version.digest,
        }


async def resolve_model(
    services: Services,
    caller: Caller,
    model: str | None,
    adapter_id: str | None = None,
    *,
    sticky: str = "",
) -> ResolvedModel:
    """Find the model a request names; `sticky` chooses the version where an alias splits requests among several.

    The base goes by the first of its names only.

    Raises:
        InvalidRequestError: Neither is given, or they name different things.
        NotFoundError: Unknown or forbidden, without saying which; code model_not_found.
    """
    if model is None and adapter_id is None:
        raise InvalidRequestError(
            "model is required.", param="model", code="missing_required_parameter"
        )
    by_model = await _resolve_one(services, caller, model, sticky) if model is not None else None
    if adapter_id is None:
        return by_model or ResolvedModel(name=services.served_name)
    by_adapter = await _resolve_one(services, caller, adapter_id, sticky)
    if by_model is None or by_model.adapter is None:
        return by_adapter
    if by_adapter.ref != by_model.ref:
        raise InvalidRequestError(
            "model and adapter_id name different adapters: send one of them.", param="adapter_id"
        )
    return by_model


def hold_weights(services: Services, model: ResolvedModel) -> Callable[[], None]:
    """Keep the weights of an ephemeral version in memory for a request; returns what ends that.

    Raises:
        NotFoundError: Its time is over; code model_not_found.
        AdapterUnavailableError: They are not in this server's memory; code adapter_not_here.
    """
    version = model.version
    if version is None or (version.expires_at is not None and version.expires_at <= services.now()):
        raise model_not_found(model.name)
    weights = version.weights_sha256
    if version.held_by != services.server_name or weights not in services.memory:
        message = f"Version {version.version} of `{model.name}` is ephemeral, and not in the memory of this server."
        hint = "Ask the server that it was pushed to, or push it to this one."
        raise AdapterUnavailableError(f"{message} {hint}", code="adapter_not_here")
    services.held[weights] += 1

    def release() -> None:
        services.held[weights] -= 1
        if not services.held[weights]:
            del services.held[weights]

    return release


async def _resolve_one(services: Services, caller: Caller, text: str, sticky: str) -> ResolvedModel:
    registry, names = services.registry, services.base_names
    if text == names[0]:
        return ResolvedModel(name=text)
    # Names of adapters have no colon.
    selector = next(
        (text.removeprefix(f"{base}:") for base in names if text.startswith(f"{base}:")), text
    )
    tenant_id = caller.tenant_id or await _tenant_of_selector(registry, selector)
    try:
        adapter, version = await registry.adapters.resolve(tenant_id, selector, sticky)
    except NotFoundError as error:
        if caller.tenant_id is None:
            raise
        raise await _with_hint(registry, caller.tenant_id, names[0], selector, error) from error
    return ResolvedModel(name=text, adapter=adapter, version=version)


async def _tenant_of_selector(registry: Registry, text: str) -> str:
    """An admin who acts for no tenant writes it in front: `tenant/name`."""
    owner = parse_selector(text).tenant
    if owner is None:
        raise model_not_found(text)
    try:
        return (await registry.tenants.get_tenant(owner)).id
    except NotFoundError as error:
        raise model_not_found(text) from error


async def _with_hint(
    registry: Registry, tenant_id: str, served_name: str, text: str, error: NotFoundError
) -> NotFoundError:
    name = text.partition("@")[0]
    with suppress(NotFoundError):
        version = (await registry.adapters.get_adapter(tenant_id, name)).current.version
        hint = f"Your adapter `{name}` has no such version or alias: ask for `{name}@{version}`, or set the alias"
        message = f"{error.message} {hint} (the name without @ means `{DEFAULT_ALIAS}`)."
        return NotFoundError(message, code=error.code, param=error.param)
    page = await registry.adapters.list_adapters(tenant_id)
    names = [served_name, *(adapter.name for adapter in page.items)]
    near = difflib.get_close_matches(name, names)
    if not near:
        return error
    hint = ", ".join(f"`{name}`" for name in near)
    return NotFoundError(
        f"{error.message} Similar names: {hint}.", code=error.code, param=error.param
    )
