"""Bodies that say more than one of the registry's records, and where adapters are now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.adapters.ref import AdapterTier
from weft.engine.status import EngineStatus
from weft.errors import EngineUnavailableError
from weft.registry.records import WEIGHTS_FILE, Adapter, AdapterUsage, AdapterVersion, Shares, Upload
from weft.server.adapters.fit import AdapterFit
from weft.server.adapters.schemas import (
    AdapterFitItem,
    AdapterFitView,
    AdapterView,
    FitNumbers,
    UploadFileView,
    UploadView,
    VersionView,
)
from weft.server.services import Services

STATUS_S = 2.0
"""Longest wait for the engine's word where the answer works without it."""
_OF_VERSION = ("version", "digest", "rank", "target_modules", "parameters", "size_bytes", "created_at")
_OF_ADAPTER = ("id", "name", "tenant", "pinned", "description", "created_at")


def adapter_view(
    adapter: Adapter, pages: int | None, residency: ResidencyMap, usage: AdapterUsage | None = None
) -> AdapterView:
    """An adapter's body, of its current version."""
    return AdapterView.model_validate(
        {
            **_of_version(adapter.current, residency),
            **{name: getattr(adapter, name) for name in _OF_ADAPTER},
            "pages": pages,
            "load_p95_s": residency.load_p95_s(adapter.current.digest),
            "aliases": {alias: _alias_view(shares) for alias, shares in adapter.aliases.items()},
            "usage": usage,
        }
    )


def version_view(adapter: Adapter, version: AdapterVersion, residency: ResidencyMap) -> VersionView:
    """One version's body."""
    return VersionView.model_validate(
        {**_of_version(version, residency), "name": adapter.name, "tenant": adapter.tenant}
    )


def _of_version(version: AdapterVersion, residency: ResidencyMap) -> dict[str, Any]:
    return {
        **{name: getattr(version, name) for name in _OF_VERSION},
        "applied_modules": {"applied": version.applied, "total": version.total},
        "residency": residency.of(version.digest),
        "report": version.report or None,
    }


def upload_view(upload: Upload, received: Mapping[str, int]) -> UploadView:
    """An upload's body; `received` has the bytes of each file that lie staged."""
    draft, is_ready = upload.draft, upload.state == "ready"
    files = {}
    for name, file in draft.files.items():
        is_here = is_ready or (name == WEIGHTS_FILE and upload.has_weights and received[name] != file.size)
        files[name] = UploadFileView(
            size=file.size, sha256=file.sha256, received=file.size if is_here else received[name]
        )
    return UploadView.model_validate(
        {
            **{name: getattr(draft, name) for name in ("name", "description", "activate")},
            **{name: getattr(upload, name) for name in ("id", "tenant", "state", "result", "expires_at", "created_at")},
            "files": files,
            "missing": [name for name, file in files.items() if file.received != file.size],
        }
    )


def fit_view(fit: AdapterFit) -> AdapterFitView:
    """The body that tells whether adapters fit."""
    room = fit.room
    return AdapterFitView(
        fits=fit.fits,
        pages=FitNumbers(total=room.pages, needed=fit.pages_needed, left=fit.pages_left),
        slots=FitNumbers(total=room.slots, needed=fit.slots_needed, left=fit.slots_left),
        kv_tokens_left=fit.kv_tokens_left,
        adapters=[AdapterFitItem.model_validate(item) for item in fit.items],
        message=fit.message,
    )


class ResidencyMap:
    """Where adapters are now, by digest."""

    def __init__(self, status: EngineStatus | None) -> None:
        residents = status.residents if status else []
        self._tiers: dict[str, AdapterTier] = {
            resident.digest: "device" if resident.tier == "device" else "host" for resident in residents
        }
        self._load_p95_s = {resident.digest: resident.load_p95_s for resident in residents}

    def of(self, digest: str) -> AdapterTier:
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


def _alias_view(shares: Shares) -> int | dict[str, int]:
    if len(shares) == 1:
        return next(iter(shares))
    return {str(version): weight for version, weight in shares.items()}
