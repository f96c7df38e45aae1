"""From the registry's records to the bodies that clients see."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Literal

from weft.engine.status import EngineStatus
from weft.errors import EngineUnavailableError
from weft.registry.records import (
    WEIGHTS_FILE,
    Adapter,
    AdapterUsage,
    AdapterVersion,
    AuditEntry,
    Grant,
    Key,
    Shares,
    Tenant,
    Upload,
    UsageEvent,
)
from weft.server.adapter_fit import AdapterFit
from weft.server.responses import (
    AdapterFitItem,
    AdapterFitView,
    AdapterUsageView,
    AdapterView,
    AppliedModules,
    AuditView,
    FitNumbers,
    GrantView,
    KeyView,
    ReportView,
    TenantView,
    UploadFileView,
    UploadView,
    UsageEventView,
    VersionView,
)
from weft.server.services import Services

STATUS_S = 2.0
"""Longest wait for the engine's word where the answer works without it."""
Residency = Literal["stored", "host", "device"]


def iso(moment: datetime) -> str:
    """UTC in ISO-8601, with milliseconds and a final Z."""
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def tenant_view(tenant: Tenant) -> TenantView:
    """A tenant's body."""
    return TenantView(
        id=tenant.id,
        name=tenant.name,
        limits=dict(tenant.limits),
        weight=tenant.weight,
        created_at=iso(tenant.created_at),
    )


def key_view(key: Key) -> KeyView:
    """A key's body, without its secret."""
    return KeyView(
        id=key.id,
        tenant=key.tenant,
        name=key.name,
        prefix=key.prefix,
        scopes=list(key.scopes),
        limits=dict(key.limits),
        expires_at=iso(key.expires_at) if key.expires_at else None,
        created_at=iso(key.created_at),
    )


def adapter_view(
    adapter: Adapter, pages: int | None, residency: ResidencyMap, usage: AdapterUsage | None = None
) -> AdapterView:
    """An adapter's body, of its current version."""
    version = adapter.current
    return AdapterView(
        id=adapter.id,
        name=adapter.name,
        tenant=adapter.tenant,
        version=version.version,
        digest=version.digest,
        rank=version.rank,
        target_modules=list(version.target_modules),
        applied_modules=AppliedModules(applied=version.applied, total=version.total),
        parameters=version.parameters,
        size_bytes=version.size_bytes,
        pages=pages,
        residency=residency.of(version.digest),
        load_p95_s=residency.load_p95_s(version.digest),
        pinned=adapter.pinned,
        aliases={alias: _alias_view(shares) for alias, shares in adapter.aliases.items()},
        description=adapter.description,
        created_at=iso(adapter.created_at),
        report=_report_view(version),
        usage=_usage_view(usage) if usage else None,
    )


def grant_view(adapter: str, grant: Grant) -> GrantView:
    """A grant's body."""
    return GrantView(
        adapter=adapter,
        tenant=grant.tenant,
        tenant_id=grant.tenant_id,
        version=grant.version,
        created_at=iso(grant.created_at),
    )


def audit_view(entry: AuditEntry) -> AuditView:
    """An audit entry's body."""
    return AuditView(
        id=str(entry.id),
        at=iso(entry.at),
        actor=entry.actor,
        action=entry.action,
        tenant=entry.tenant,
        target=entry.target,
        detail=dict(entry.detail),
    )


def version_view(adapter: Adapter, version: AdapterVersion, residency: Residency) -> VersionView:
    """One version's body."""
    return VersionView(
        name=adapter.name,
        tenant=adapter.tenant,
        version=version.version,
        digest=version.digest,
        rank=version.rank,
        target_modules=list(version.target_modules),
        applied_modules=AppliedModules(applied=version.applied, total=version.total),
        parameters=version.parameters,
        size_bytes=version.size_bytes,
        residency=residency,
        created_at=iso(version.created_at),
        report=_report_view(version),
    )


def upload_view(upload: Upload, received: Mapping[str, int]) -> UploadView:
    """An upload's body; `received` has the bytes of each file that lie staged."""
    draft, is_ready = upload.draft, upload.state == "ready"
    files = {}
    for name, file in draft.files.items():
        is_here = is_ready or (name == WEIGHTS_FILE and upload.has_weights and received[name] != file.size)
        files[name] = UploadFileView(
            size=file.size, sha256=file.sha256, received=file.size if is_here else received[name]
        )
    return UploadView(
        id=upload.id,
        name=draft.name,
        tenant=upload.tenant,
        description=draft.description,
        activate=draft.activate,
        state=upload.state,
        files=files,
        missing=[name for name, file in files.items() if file.received != file.size],
        result=None if upload.result is None else dict(upload.result),
        expires_at=iso(upload.expires_at),
        created_at=iso(upload.created_at),
    )


def fit_view(fit: AdapterFit) -> AdapterFitView:
    """The body that tells whether adapters fit."""
    room = fit.room
    return AdapterFitView(
        fits=fit.fits,
        pages=FitNumbers(total=room.pages, needed=fit.pages_needed, left=fit.pages_left),
        slots=FitNumbers(total=room.slots, needed=fit.slots_needed, left=fit.slots_left),
        kv_tokens_left=fit.kv_tokens_left,
        adapters=[
            AdapterFitItem(
                adapter=item.adapter,
                version=item.version,
                digest=item.digest,
                rank=item.rank,
                target_modules=list(item.target_modules),
                pages=item.pages,
                waste=round(item.waste, 4),
                count=item.count,
            )
            for item in fit.items
        ],
        message=fit.message,
    )


def usage_event_view(event: UsageEvent) -> UsageEventView:
    """A usage event's body."""
    return UsageEventView(
        id=event.id,
        at=iso(event.at),
        tenant=event.tenant,
        key=event.key_id,
        adapter=event.adapter,
        version=event.adapter_version,
        digest=event.adapter_digest,
        request_id=event.request_id,
        endpoint=event.endpoint,
        service_class=event.service_class,
        status=event.status,
        prompt_tokens=event.prompt_tokens,
        cached_tokens=event.cached_tokens,
        completion_tokens=event.completion_tokens,
        queue_s=event.queue_s,
        ttft_s=event.ttft_s,
        duration_s=event.duration_s,
        adapter_state=event.adapter_state,
    )


class ResidencyMap:
    """Where adapters are now, by digest."""

    def __init__(self, status: EngineStatus | None) -> None:
        residents = status.residents if status else []
        self._tiers: dict[str, Residency] = {
            resident.digest: "device" if resident.tier == "device" else "host" for resident in residents
        }
        self._load_p95_s = {resident.digest: resident.load_p95_s for resident in residents}

    def of(self, digest: str) -> Residency:
        """Device, host, or stored for what is nowhere nearer."""
        return self._tiers.get(digest, "stored")

    def load_p95_s(self, digest: str) -> float | None:
        """Seconds that 95 % of its last loads took at most; None for what is in no memory."""
        return self._load_p95_s.get(digest)


async def residency_now(services: Services) -> ResidencyMap:
    """Ask the engine; while it is away or busy for long, every adapter counts as stored."""
    try:
        return ResidencyMap(await services.engine_status(STATUS_S))
    except EngineUnavailableError:
        return ResidencyMap(None)


def _report_view(version: AdapterVersion) -> ReportView | None:
    return ReportView(**version.report) if version.report else None


def _usage_view(usage: AdapterUsage) -> AdapterUsageView:
    return AdapterUsageView(
        requests=usage.requests,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
        last_used_at=iso(usage.last_used_at) if usage.last_used_at else None,
    )


def _alias_view(shares: Shares) -> int | dict[str, int]:
    if len(shares) == 1:
        return next(iter(shares))
    return {str(version): weight for version, weight in shares.items()}
