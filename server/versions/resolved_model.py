"""The model that a request names, as all that serves the request knows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from manylora.adapters.ref import AdapterRef
from manylora.registry.records import AdapterIdentity, AdapterVersion, Identity, UsageEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedModel:
    """The model that `model` and `adapter_id` name."""

    name: str
    """Text that the client sent as `adapter_id`, or else as `model`; echoed in the response."""
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

    def usage_event(
        self,
        identity: Identity,
        tenant_id: str | None,
        tenant: str | None,
        request_id: str,
        endpoint: str,
    ) -> Callable[..., UsageEvent]:
        """Maker of the usage event of a request for it, of what is known at the end."""
        adapter = self.adapter
        version = self.version
        return partial(
            UsageEvent,
            tenant_id=tenant_id,
            tenant=tenant,
            key_id=identity.key_id,
            adapter_id=adapter.id if adapter else None,
            adapter=adapter.name_for(tenant_id) if adapter else None,
            adapter_version=version.version if version else None,
            adapter_digest=version.digest if version else None,
            request_id=request_id,
            endpoint=endpoint,
        )

    @property
    def headers(self) -> dict[str, str]:
        """Response headers that name the version that answered."""
        if self.adapter is None or self.version is None:
            return {}
        return {
            "x-manylora-adapter": f"{self.adapter.tenant}/{self.adapter.name}@{self.version.version}",
            "x-manylora-adapter-digest": self.version.digest,
        }
