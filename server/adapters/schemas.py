"""Bodies of adapters, uploads and fit: what clients send, what Manylora answers, and how it is made of records."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from manylora.adapters.ref import AdapterTier, ResidentAdapter
from manylora.errors import InvalidRequestError
from manylora.lora_rows import MAX_RANK
from manylora.registry.db.models import UploadRow
from manylora.registry.names import MAX_DESCRIPTION
from manylora.registry.records import Adapter, AdapterUsage, AdapterVersion, VersionWeights
from manylora.server.http.bodies import (
    ALL_LINEAR,
    MODULE_NAMES,
    AdapterUsageView,
    Body,
    Listing,
    Moment,
    View,
)

MAX_COPIES = 1000
"""Most servers on which an adapter may be pinned."""
Residents = Mapping[str, ResidentAdapter]
"""Adapters in device or host memory, by digest."""


class AppliedModules(View):
    """Number of the base's modules that an adapter changes, counted over all layers."""

    applied: int
    total: int


class ReportView(View):
    """Remarks of the check of an upload."""

    dtype: list[str]
    layout: Literal["peft", "mlx"]
    """Layout of the matrices in the file; MLX's are the transposes of PEFT's."""
    renamed: int
    """Tensors whose names hold wrappers, an adapter's name or a multimodal model's prefix, which were skipped."""
    warnings: list[str]
    """Probable mistakes; the adapter is served all the same."""


class VersionFields(View):
    """Fields of a version, shown alone and with its adapter; named as in the record."""

    name: str
    tenant: str
    version: int
    digest: str
    rank: int
    """The largest of any module."""
    target_modules: list[str]
    applied_modules: AppliedModules
    parameters: int
    size_bytes: int
    peft_version: str | None
    """The PEFT that saved it, as its config says; null where it does not say."""
    residency: AdapterTier
    ephemeral: bool
    """True if its weights are in the memory of one server only, and go with it."""
    expires_at: Moment | None
    """When an ephemeral version is withdrawn; null: not by time."""
    created_at: Moment
    report: ReportView


class VersionView(VersionFields):
    """One immutable upload."""

    object: Literal["adapter.version"] = "adapter.version"


class VersionList(Listing[VersionView]):
    """An adapter's versions, newest first."""


class AdapterView(VersionFields):
    """An adapter, with what its current version is."""

    id: str
    object: Literal["adapter"] = "adapter"
    state: Literal["ready"] = "ready"
    pages: int | None
    """Pages it takes on the device; null where its weights cannot be read now."""
    load_p95_s: float | None
    """Seconds that 95 % of its last 32 loads onto the device took at most; null while it is in no memory."""
    pinned: bool
    pinned_copies: int
    """On how many servers it is pinned; 0 if it is not."""
    aliases: dict[str, int | dict[str, int]]
    """Alias to version, or to the weights of the versions among which it splits its requests."""
    description: str | None
    usage: AdapterUsageView | None = None
    """On GET only."""


class UploadFileView(View):
    """A file of an upload."""

    size: int
    sha256: str
    received: int
    """Bytes that are here: the next one to send."""


class UploadView(View):
    """An upload in pieces."""

    id: str
    object: Literal["upload"] = "upload"
    name: str
    tenant: str
    description: str | None
    activate: bool
    state: Literal["uploading", "ready", "rejected"]
    files: dict[str, UploadFileView]
    missing: list[str]
    """Files that are not all here."""
    result: dict[str, Any] | None
    """Result of the upload: the adapter as the answer showed it, or the error."""
    expires_at: Moment
    created_at: Moment


class UploadList(Listing[UploadView]):
    """A page of uploads, oldest first."""


class AdapterList(Listing[AdapterView]):
    """A page of adapters."""


class FitNumbers(View):
    """Amounts that there are in all, that are needed, and that are left."""

    total: int
    needed: int
    left: int


class AdapterFitItem(View):
    """One adapter, or several that do not exist yet and would look alike."""

    adapter: str | None = None
    """Null for adapters that do not exist yet."""
    version: int | None = None
    digest: str | None = None
    """Adapters of one digest share their pages and count once."""
    rank: int
    """The largest of any module."""
    target_modules: list[str]
    pages: int
    """Device pages of each."""
    waste: Annotated[float, AfterValidator(lambda share: round(share, 4))]
    """Share of these pages that holds no weights, from 0 to 1."""
    count: int = 1


class AdapterFitView(View):
    """Answer of POST /v1/adapters:fit."""

    object: Literal["adapter_fit"] = "adapter_fit"
    fits: bool
    """True if all can be on the device at once. False only means that they take turns: idle adapters cost nothing."""
    pages: FitNumbers
    slots: FitNumbers
    kv_tokens_left: int
    """Tokens of KV cache that fit beside all of them."""
    adapters: list[AdapterFitItem]
    message: str


MAX_PLANNED = 1 << 20
"""Most planned adapters of one kind in one call."""


if TYPE_CHECKING:
    _Module = str
else:
    _Module = Literal[MODULE_NAMES]
_Modules = Annotated[list[_Module], Field(min_length=1)]
_Targets = Annotated[
    _Modules,
    BeforeValidator(
        lambda value: [*MODULE_NAMES] if value == ALL_LINEAR else value,
        json_schema_input_type=_Modules | Literal["all-linear"],
    ),
]


class PlannedAdapters(Body):
    """Adapters that do not exist yet: of one rank, on the same modules of every layer."""

    rank: int = Field(ge=1, le=MAX_RANK)
    target_modules: _Targets = Field(default_factory=lambda: [*MODULE_NAMES])
    """`all-linear`, or names of modules."""
    count: int = Field(default=1, ge=1, le=MAX_PLANNED)


class AdapterFitBody(Body):
    """Body of POST /v1/adapters:fit."""

    adapters: list[Annotated[str, Field(min_length=1, max_length=512)]] = Field(
        default_factory=list, max_length=1000
    )
    """Each as in `model`: `name`, `name@3`, `name@prod`, `name@sha256:...`."""
    ranks: list[PlannedAdapters] = Field(default_factory=list, max_length=32)

    @model_validator(mode="after")
    def _asks_for_something(self) -> AdapterFitBody:
        if not self.adapters and not self.ranks:
            message = "Give adapters by name, or ranks you plan."
            raise InvalidRequestError(message, param="adapters", code="missing_required_parameter")
        return self


def _version(key: str) -> int:
    """The version that a key of an object names."""
    if not re.fullmatch("[1-9][0-9]{0,8}", key):
        raise ValueError("a version is a whole number from 1")
    return int(key)


_Weights = Annotated[
    dict[Annotated[int, BeforeValidator(_version)], Annotated[int, Field(ge=1, le=10_000)]],
    Field(min_length=1, max_length=8),
]


def _meaning(value: object) -> object:
    """Versions by weight; a number is a version that has all of it."""
    if type(value) is int:
        return {str(value): 1}
    if isinstance(value, dict):
        return value
    raise ValueError(
        'an alias means a version, such as 2, or versions by weight, such as {"2": 90, "3": 10}'
    )


_Meaning = Annotated[
    _Weights,
    BeforeValidator(_meaning, json_schema_input_type=Annotated[int, Field(ge=1)] | _Weights),
]


class AdapterPatchBody(Body):
    """Body of PATCH /v1/adapters/{name}."""

    description: str | None = Field(None, max_length=4096)
    pinned: bool | None = None
    pinned_copies: int | None = Field(None, ge=1, le=MAX_COPIES)
    """On how many servers to keep it, with `pinned` true; 1 if it is left out. Each copy counts as pinned pages."""
    aliases: dict[str, _Meaning | None] = Field(default_factory=dict, max_length=64)
    """Merged into what is there: a version, versions by weight (a canary), or null to remove the alias."""

    @property
    def copies(self) -> int | None:
        """Copies to pin, 0 to unpin; None leaves the pin as it is."""
        return self.pinned if self.pinned is None else int(self.pinned) * (self.pinned_copies or 1)

    @model_validator(mode="after")
    def _copies_are_of_a_pin(self) -> AdapterPatchBody:
        if self.pinned_copies is not None and not self.pinned:
            message = 'pinned_copies says on how many servers to pin: give it with "pinned": true.'
            raise InvalidRequestError(message, param="pinned_copies")
        return self


class UploadFileBody(Body):
    """A file that is going to be sent."""

    size: int = Field(ge=1, lt=1 << 53)
    """Bytes."""
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class VersionBody(Body):
    """A version to come, in whatever way its files come."""

    name: str = Field(max_length=512)
    description: str | None = Field(default=None, max_length=MAX_DESCRIPTION)
    activate: bool = True
    """Let the plain name mean the version once it is there."""
    tenant: str | None = Field(default=None, max_length=512)
    """For admins."""


class UploadBody(VersionBody):
    """Body of POST /v1/uploads."""

    files: dict[Literal["adapter_config.json", "adapter_model.safetensors"], UploadFileBody] = (
        Field(min_length=2)
    )


class ImportBody(VersionBody):
    """Body of POST /v1/adapters:import."""

    source: str = Field(max_length=2048)
    """`hf://organization/repository[@revision]` or `s3://bucket/prefix`."""


class LoadBody(Body):
    """Body of POST /v1/load_lora_adapter, as of vLLM."""

    lora_name: str = Field(min_length=1, max_length=512)
    lora_path: str = Field(min_length=1, max_length=4096)
    """Folder on the server's machine, below one of `adapter.load_roots`."""
    load_inplace: bool = False
    """A name that is loaded already gets a new version in any case."""
    is_3d_lora_weight: Literal[False] | None = None
    """Weights of experts in three dimensions are not served."""


class UnloadBody(Body):
    """Body of POST /v1/unload_lora_adapter, as of vLLM."""

    lora_name: str = Field(min_length=1, max_length=512)
    lora_int_id: int | None = None
    """Names decide; the number is not looked at."""


def adapter_view(
    adapter: Adapter, pages: int | None, residents: Residents, usage: AdapterUsage | None = None
) -> AdapterView:
    """An adapter's body, of its current version."""
    resident = residents.get(adapter.current.digest)
    own = {
        name: getattr(adapter, name)
        for name in ("id", "pinned", "pinned_copies", "description", "created_at")
    }
    return AdapterView.model_validate(
        {
            **_version_fields(adapter, adapter.current, resident),
            **own,
            "pages": pages,
            "load_p95_s": resident and resident.load_p95_s,
            "aliases": {alias: _alias_view(weights) for alias, weights in adapter.aliases.items()},
            "usage": usage,
        }
    )


def version_view(adapter: Adapter, version: AdapterVersion, residents: Residents) -> VersionView:
    """One version's body."""
    return VersionView.model_validate(
        _version_fields(adapter, version, residents.get(version.digest))
    )


def _version_fields(
    adapter: Adapter, version: AdapterVersion, resident: ResidentAdapter | None
) -> dict[str, Any]:
    at_least = "stored" if version.held_by is None else "host"
    tier = at_least if resident is None else "device" if resident.tier == "device" else "host"
    return {
        **{
            name: getattr(version, name)
            for name in VersionFields.model_fields
            if hasattr(version, name)
        },
        "name": adapter.name,
        "tenant": adapter.tenant,
        "applied_modules": version,
        "residency": tier,
        "ephemeral": version.held_by is not None,
    }


def _alias_view(weights: VersionWeights) -> int | dict[str, int]:
    if len(weights) == 1:
        return next(iter(weights))
    return {str(version): weight for version, weight in weights.items()}


def upload_view(upload: UploadRow, received: Mapping[str, int]) -> UploadView:
    """An upload's body; `received` has the bytes of each file that lie staged."""
    here = {
        name: file["size"] if upload.state == "ready" else received.get(name, 0)
        for name, file in upload.files.items()
    }
    own = {name: getattr(upload, name) for name in UploadView.model_fields if hasattr(upload, name)}
    files = {name: {**file, "received": here[name]} for name, file in upload.files.items()}
    missing = [name for name, file in upload.files.items() if here[name] != file["size"]]
    return UploadView.model_validate({**own, "files": files, "missing": missing})
