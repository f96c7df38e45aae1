"""Names of models: the base by its served name, or an adapter version of the caller's tenant.

An adapter may stand behind a name of the base and a colon, as some clients of vLLM write it: `base:name@alias`.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from manylora.errors import InvalidRequestError, NotFoundError
from manylora.registry.names import DEFAULT_ALIAS, model_not_found, parse_selector
from manylora.registry.records import ResolvedModel

if TYPE_CHECKING:
    from manylora.registry.registry import Registry


@dataclass(eq=False)
class ModelNames:
    """Finds the models that requests name."""

    registry: Registry
    base_names: Sequence[str]
    """Names of the base, the one that clients call it by first."""
    has_hints: bool = True
    """Look for what may have been meant by an unknown name."""

    async def resolve(
        self,
        tenant_id: str | None,
        model: str | None,
        adapter_id: str | None = None,
        *,
        sticky: str = "",
    ) -> ResolvedModel:
        """Find the model a request names. The base goes by the first of its names only.

        Args:
            tenant_id: The caller's tenant; None for an admin who acts for none.
            model: Name of an adapter or of the base.
            adapter_id: Name of an adapter.
            sticky: Chooses the version where an alias splits requests among several.

        Raises:
            InvalidRequestError: Neither is given, or they name different things.
            NotFoundError: Unknown or forbidden, without saying which; code model_not_found.
        """
        find = partial(self._resolve_one, tenant_id, sticky)
        by_model = await find(model) if model is not None else None
        by_adapter = await find(adapter_id) if adapter_id is not None else None
        found = by_adapter or by_model
        if found is None:
            raise InvalidRequestError(
                "model is required.", param="model", code="missing_required_parameter"
            )
        if by_adapter is None or by_model is None or by_model.adapter is None:
            return found
        if by_adapter.ref != by_model.ref:
            raise InvalidRequestError(
                "model and adapter_id name different adapters: send one of them.",
                param="adapter_id",
            )
        return by_model

    async def _resolve_one(self, tenant_id: str | None, sticky: str, text: str) -> ResolvedModel:
        if text in self.base_names[:1]:
            return ResolvedModel(name=text)
        # Names of adapters have no colon.
        prefixes = (f"{base}:" for base in self.base_names)
        prefix = next((each for each in prefixes if text.startswith(each)), "")
        selector = text.removeprefix(prefix)
        owner_id = tenant_id or await self._tenant_of_selector(selector)
        try:
            adapter, version = await self.registry.adapters.resolve(owner_id, selector, sticky)
        except NotFoundError as error:
            if tenant_id is None or not self.has_hints:
                raise
            raise await self._with_hint(tenant_id, selector, error) from error
        return ResolvedModel(name=text, adapter=adapter, version=version)

    async def _tenant_of_selector(self, text: str) -> str:
        """Id of the tenant that an admin who acts for none writes in front: `tenant/name`."""
        owner = parse_selector(text).tenant
        if owner is None:
            raise model_not_found(text)
        try:
            return (await self.registry.tenants.get_tenant(owner)).id
        except NotFoundError as error:
            raise model_not_found(text) from error

    async def _with_hint(self, tenant_id: str, text: str, error: NotFoundError) -> NotFoundError:
        """The error with a version or names that the client may have meant."""
        name = text.partition("@")[0]
        adapters = self.registry.adapters
        with suppress(NotFoundError):
            version = (await adapters.get_adapter(tenant_id, name)).current.version
            hint = f"Your adapter `{name}` has no such version or alias: ask for `{name}@{version}`, or set the alias"
            message = f"{error.message} {hint} (the name without @ means `{DEFAULT_ALIAS}`)."
            return NotFoundError(message, code=error.code, param=error.param)
        page = await adapters.list_adapters(tenant_id)
        names = [*self.base_names[:1], *(adapter.name for adapter in page.items)]
        near = difflib.get_close_matches(name, names)
        if not near:
            return error
        hint = ", ".join(f"`{name}`" for name in near)
        return NotFoundError(
            f"{error.message} Similar names: {hint}.", code=error.code, param=error.param
        )
