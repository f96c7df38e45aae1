"""Reads a PEFT or MLX LoRA checkpoint and checks all of it, against the base if one is given. Needs no PEFT.

Every tensor must be the `lora_A` or `lora_B` of a linear layer of the base. Pairs must be complete, and have the base's
sizes and the rank of the config. Unknown content is refused, never skipped. Knows nothing of pages.
"""

from __future__ import annotations

import io
import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple, NoReturn

from manylora.adapters.base_shape import MODULE_PATHS, BaseShape
from manylora.adapters.checkpoint.findings import Findings, refuse, refuse_unsupported
from manylora.adapters.checkpoint.lora_fields import LoraFields
from manylora.adapters.checkpoint.peft_config import check_config, check_scaling, parse_config
from manylora.adapters.checkpoint.report import report_on
from manylora.adapters.checkpoint.safetensors_header import TensorEntry, check_header
from manylora.adapters.checkpoint.tensor_names import TensorName, TensorNames, TensorPlace
from manylora.adapters.checkpoint.values import scan_values as scan
from manylora.adapters.ref import LoraSpec
from manylora.errors import AdapterIncompatibleError
from manylora.strict_json import named

_SAVE_AGAIN = (
    "Save the adapter again with PEFT's save_pretrained, and upload the file that it writes."
)
_ANOTHER_BASE = (
    "The adapter was probably trained on another base model: upload it to a server of that one, or train it on this "
    "one."
)
_TRANSPOSE = "Save it as PEFT does, lora_A as [rank, in] and lora_B as [out, rank]."
_FOLDED = (
    "The server's base model is an AWQ or SmoothQuant checkpoint: its layers see inputs that are divided by scales, so "
    "an adapter that was trained on the original model changes them wrongly."
)
_FOLDED_HINT = (
    "Serve the original model, or a checkpoint quantised without such scales (GPTQ, NF4, FP8, GGUF). If the adapters "
    "were trained on this very checkpoint, start the server with model.adapters_trained_on_quantised: true."
)
_PEFT_VERSION = re.compile(r"[0-9A-Za-z][0-9A-Za-z.+@_-]{,63}")


class LoraTensor(NamedTuple):
    """One matrix of the file."""

    entry: TensorEntry
    """Its shape and the place of its bytes."""
    name: TensorName
    """Its place in the model."""

    @property
    def path(self) -> str:
        """Path of its module, without wrappers: `model.layers.0.self_attn.q_proj`."""
        return f"{self.name.stem}.{self.name.place.layer}.{MODULE_PATHS[self.name.place.module]}"


Pairs = Mapping[tuple[int, int], tuple[LoraTensor, LoraTensor]]
"""`lora_A` and `lora_B` by (layer, module index)."""
MakeSpec = Callable[[Pairs], LoraSpec | None]
"""Function from the modules of a file to the spec that they must fit; None if there is no spec."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """An adapter that was checked and can be served."""

    spec: LoraSpec
    tensors: tuple[LoraTensor, ...]
    """Tensors, ordered by layer, module, part. Each has two extents."""
    ranks: dict[tuple[int, int], int]
    """True rank by (layer, module index). Modules without an adapter are absent."""
    scalings: dict[tuple[int, int], float]
    """Factor of B @ A by (layer, module index)."""
    parameters: int
    """Numbers in all tensors."""
    largest_rank: int
    target_modules: tuple[str, ...]
    """Names of the modules that are changed in some layer, in table order: `q_proj`, ..."""
    applied: int
    """Linear layers that the adapter changes."""
    total: int
    """Linear layers that adapters of this base may change. Without a base, the file's last layer counts as the last."""
    peft_version: str | None = field(default=None, compare=False)
    """Version of the PEFT that saved it; None if the config has no version of at most 64 characters."""
    report: Mapping[str, object] = field(default_factory=dict, compare=False)
    """Notes for its owner (`report_on`); empty if the values were not checked."""

    def facts(self) -> dict[str, object]:
        """Facts that the registry keeps of a version, under the names of `VersionFacts`, and `ranks`, as JSON types."""
        return {
            "spec": self.spec.canonical(),
            "ranks": [[layer, module, rank] for (layer, module), rank in self.ranks.items()],
            "rank": self.largest_rank,
            "target_modules": list(self.target_modules),
            **{
                name: getattr(self, name)
                for name in ("applied", "total", "parameters", "peft_version", "report")
            },
        }


def read_checkpoint(
    config_bytes: bytes,
    weights: Path | int,
    base: BaseShape | None,
    max_rank: int,
    scan_values: bool = True,
    base_names: Sequence[str] = (),
) -> Checkpoint:
    """Read and check a config and its weights, as PEFT's save_pretrained or MLX wrote them.

    The error lists everything that is wrong with both files (`findings`). A file is read to its first unreadable part,
    and values are checked only if the tensors are those of an adapter.

    Args:
        config_bytes: The config file.
        weights: The weights file, whose links are not followed, or its open descriptor, which is closed.
        base: Shape of the base model; None checks sizes only against each other.
        max_rank: Largest rank that is served.
        scan_values: Check every value. Only a file that was checked before may do without.
        base_names: Names of the base, for the report on an adapter that was trained on another.

    Raises:
        PayloadTooLargeError: The config is longer than 64 KiB.
        AdapterFormatError: A file is not as PEFT writes it; codes `config.*` and `weights.*`.
        AdapterIncompatibleError: It is sound, but not for this base or not served; codes `config.*` and `weights.*`.
        OSError: The weights cannot be opened or read.
    """
    findings = Findings()
    findings.attempt(_check_base, base)
    fields = findings.attempt(check_config, config_bytes, findings)

    def make_spec(pairs: Pairs) -> LoraSpec | None:
        return None if fields is None else _spec_of(fields, pairs, max_rank, findings)

    found = findings.attempt(_check_file, make_spec, weights, base, scan_values, findings)
    checkpoint, zeros = findings.passed(found)
    if not scan_values:
        return checkpoint
    config = parse_config(config_bytes)
    report = report_on(findings.passed(fields), config, checkpoint.tensors, zeros, base_names)
    written = config.get("peft_version")
    version = written if isinstance(written, str) and _PEFT_VERSION.fullmatch(written) else None
    return replace(checkpoint, peft_version=version, report=report)


def check_weights(
    spec: LoraSpec,
    header: bytes,
    file_size: int,
    base: BaseShape,
    pause: Callable[[], None] = lambda: None,
) -> Checkpoint:
    """Check the header of a weights file that was accepted before. Values are not checked again.

    Args:
        spec: Config as it was read then.
        header: Bytes of the file up to its first tensor.
        file_size: Bytes of the whole file.
        base: Shape of the base model.
        pause: Called between pieces of a few milliseconds.

    Raises:
        AdapterFormatError: A file is not as PEFT writes it; codes `config.*` and `weights.*`.
        AdapterIncompatibleError: It is sound, but not for this base; codes `weights.*`.
    """
    findings = Findings()
    findings.attempt(_check_base, base)
    tensors = findings.passed(
        findings.attempt(check_header, io.BytesIO(header), file_size, findings)
    )
    pause()
    return findings.passed(
        findings.attempt(_check_tensors, lambda _: spec, tensors, base, findings)
    )


def _check_base(base: BaseShape | None) -> None:
    if base is not None and base.folds_input_scale:
        raise AdapterIncompatibleError(_FOLDED, code="config.base_folds_scale", hint=_FOLDED_HINT)


def _check_file(
    make_spec: MakeSpec,
    weights: Path | int,
    base: BaseShape | None,
    scan_values: bool,
    findings: Findings,
) -> tuple[Checkpoint, frozenset[str]] | None:
    with _open_plain(weights) as file:
        seen = findings.seen
        tensors = check_header(file, os.fstat(file.fileno()).st_size, findings)
        found = _check_tensors(make_spec, tensors, base, findings)
        if findings.seen > seen:
            return None
        zeros = scan(file, tensors, findings) if scan_values else frozenset()
    return None if found is None else (found, zeros)


def _open_plain(file: Path | int) -> BufferedReader:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    fd = file if isinstance(file, int) else os.open(file, flags)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        refuse("weights.not_safetensors", "The weights are not a plain file.", None, _SAVE_AGAIN)
    return open(fd, "rb")


def _check_tensors(
    make_spec: MakeSpec, tensors: Sequence[TensorEntry], base: BaseShape | None, findings: Findings
) -> Checkpoint | None:
    """Join the tensors to a checkpoint; None if a tensor is wrong, or there is no spec that they must fit."""
    seen = findings.seen
    placed = _place(tensors, base, findings)
    pairs = _pair(placed, findings)
    spec = make_spec(pairs) if pairs else None
    if spec is None:
        return None
    widths: dict[int, tuple[int, int]] = {}
    if base:
        widths = {
            index: (module.in_features, module.out_features)
            for index, module in enumerate(base.modules)
        }
    ranks: dict[tuple[int, int], int] = {}
    scalings: dict[tuple[int, int], float] = {}
    for (layer, module), (lora_a, lora_b) in sorted(pairs.items()):
        path = lora_a.path
        # Without a base, the first layer with an adapter for a module gives its width.
        width_in, width_out = widths.setdefault(module, (_width(lora_a), _width(lora_b)))
        rank = spec.module_rank(path)
        findings.attempt(_check_shape, lora_a, rank, width_in)
        findings.attempt(_check_shape, lora_b, rank, width_out)
        ranks[layer, module] = rank
        if rank:
            scalings[layer, module] = (
                findings.attempt(check_scaling, spec.module_scaling(path), path) or 0.0
            )
    if findings.seen > seen:
        return None
    modules = sorted({module for _, module in ranks})
    num_layers = base.num_layers if base else max(layer for layer, _ in ranks) + 1
    return Checkpoint(
        spec=spec,
        tensors=tuple(placed[place] for place in sorted(placed)),
        ranks=ranks,
        scalings=scalings,
        parameters=sum(rank * sum(widths[module]) for (_, module), rank in ranks.items()),
        largest_rank=max(ranks.values()),
        target_modules=tuple(MODULE_PATHS[module].rsplit(".", 1)[-1] for module in modules),
        applied=len(ranks),
        total=num_layers * (len(base.modules) if base else len(MODULE_PATHS)),
    )


def _spec_of(fields: LoraFields, pairs: Pairs, max_rank: int, findings: Findings) -> LoraSpec:
    """Make the spec of the config for these modules, and note modules that cannot be served."""
    ranks = {}
    for lora_a, _ in pairs.values():
        rank = ranks[lora_a.path] = lora_a.entry.shape[lora_a.name.rank_axis]
        findings.attempt(_check_rank_limit, fields, lora_a, rank, max_rank)
        findings.attempt(_check_written_path, fields, lora_a, rank)
    return fields.spec(ranks)


def _check_rank_limit(fields: LoraFields, tensor: LoraTensor, rank: int, max_rank: int) -> None:
    wanted, field = fields.rank_of(tensor.path)
    if rank > max_rank and wanted in (None, rank):
        message = f"Tensor {tensor.entry.name} has rank {rank}; this server serves ranks up to {max_rank}."
        hint = "Retrain with a smaller rank, or have adapter.max_rank raised on the server."
        refuse_unsupported("config.rank_invalid", message, named(field), hint)


def _check_written_path(fields: LoraFields, tensor: LoraTensor, rank: int) -> None:
    """Refuse patterns that match otherwise on the paths of the wrapped model that was trained."""
    path = tensor.path
    written = tensor.name.written
    if written == path:
        return
    of_rank = fields.rank_of(path)[0] == fields.rank_of(written)[0]
    if not of_rank or fields.alpha_of(path, rank) != fields.alpha_of(written, rank):
        refuse_unsupported(
            "config.pattern_unsupported",
            f"Tensor {tensor.entry.name} is of a wrapped model, where rank_pattern and alpha_pattern match other "
            f"modules than on the plain one: {path} is {written} there.",
            "alpha_pattern" if of_rank else "rank_pattern",
            "Write the patterns by module name alone, as in q_proj, or save the adapter from the model without its "
            "wrappers.",
        )


def _place(
    tensors: Sequence[TensorEntry], base: BaseShape | None, findings: Findings
) -> dict[TensorPlace, LoraTensor]:
    names = TensorNames(base)
    placed: dict[TensorPlace, LoraTensor] = {}
    spellings: dict[tuple[str | None, str, str], str] = {}
    for tensor in tensors:
        name = findings.attempt(names.read, tensor.name)
        if name is None:
            continue
        spellings.setdefault((name.adapter, name.stem, name.layout), tensor.name)
        if len({adapter for adapter, _, _ in spellings if adapter is not None}) > 1:
            _refuse_mixture(spellings)
        findings.attempt(_check_new, tensor, placed.get(name.place))
        placed[name.place] = LoraTensor(tensor, name)
    if len(spellings) > 1:
        _refuse_mixture(spellings)
    return placed


def _check_new(tensor: TensorEntry, twin: LoraTensor | None) -> None:
    if twin is not None:
        message = (
            f"Tensors {twin.entry.name} and {tensor.name} are the same matrix in two spellings."
        )
        refuse("weights.duplicate_tensor", message, tensor.name, "Keep one.")
    if not _is_matrix(tensor):
        _refuse_degenerate(tensor)


def _is_matrix(tensor: TensorEntry) -> bool:
    return len(tensor.shape) == 2 and 0 not in tensor.shape


def _refuse_mixture(spellings: Mapping[tuple[str | None, str, str], str]) -> NoReturn:
    (one, first), (other, second), *_ = spellings.items()
    why = "are of two layouts"
    if one[0] != other[0]:
        why = f"belong to two adapters, {one[0] or 'one without a name'} and {other[0] or 'one without a name'}"
    elif one[1] != other[1]:
        why = f"belong to two models, with layers at {one[1]} and at {other[1]}"
    hint = "Save each adapter by itself with PEFT's save_pretrained, and upload it by itself."
    refuse_unsupported(
        "weights.tensor_not_allowed", f"Tensors {first} and {second} {why}.", second, hint
    )


def _refuse_degenerate(tensor: TensorEntry) -> NoReturn:
    hint = _SAVE_AGAIN
    if 0 in tensor.shape:
        hint = (
            "Training with DeepSpeed ZeRO-3 saves empty tensors unless the parameters are gathered first: save again "
            "with stage3_gather_16bit_weights_on_model_save."
        )
    message = (
        f"Tensor {tensor.name} has shape {list(tensor.shape)}; expected two extents of at least 1."
    )
    refuse("weights.shape_invalid", message, tensor.name, hint)


def _pair(
    placed: Mapping[TensorPlace, LoraTensor], findings: Findings
) -> dict[tuple[int, int], tuple[LoraTensor, LoraTensor]]:
    """Both matrices of each module, if both have two extents."""
    pairs = {}
    for place, tensor in placed.items():
        other = findings.attempt(_partner, placed, place)
        if other is not None and _is_matrix(tensor.entry) and _is_matrix(other.entry):
            pairs[place.layer, place.module] = (
                (tensor, other) if place.part == "a" else (other, tensor)
            )
    return pairs


def _partner(placed: Mapping[TensorPlace, LoraTensor], place: TensorPlace) -> LoraTensor:
    other = placed.get(place._replace(part="b" if place.part == "a" else "a"))
    if other is None:
        name = placed[place].entry.name
        missing = "lora_B" if place.part == "a" else "lora_A"
        message = f"Tensor {name} has no partner: its {missing} is not in the file, and each module needs both."
        hint = "Save the adapter again with PEFT's save_pretrained, which writes both."
        refuse("weights.pair_incomplete", message, name, hint)
    return other


def _width(tensor: LoraTensor) -> int:
    return tensor.entry.shape[1 - tensor.name.rank_axis]


def _check_shape(lora: LoraTensor, rank: int, width: int) -> None:
    tensor, name = lora
    got_rank = tensor.shape[name.rank_axis]
    got_width = _width(lora)
    if (got_rank, got_width) == (rank, width):
        return
    got = list(tensor.shape)
    if got_width == width:
        message = f"Tensor {tensor.name} has shape {got}, so rank {got_rank}; expected rank {rank}."
        hint = (
            "Set r, or rank_pattern for single modules, to the rank of the tensors, and lora_alpha so that lora_alpha "
            "/ r is the scaling that was trained with."
        )
        refuse("weights.rank_mismatch", message, tensor.name, hint)
    expected = [rank, width] if name.rank_axis == 0 else [width, rank]
    is_transposed = got_rank == width and got_width == rank
    message = f"Tensor {tensor.name} has shape {got}, expected {expected}.{' It looks transposed.' * is_transposed}"
    hint = _TRANSPOSE if is_transposed else _ANOTHER_BASE
    refuse_unsupported("weights.shape_mismatch", message, tensor.name, hint)
