"""Reads a PEFT LoRA checkpoint and checks it whole, against the base where there is one. Loads nothing with PEFT.

Every tensor must be the `lora_A` or `lora_B` of a linear layer that the base has, complete in pairs, of the base's
sizes and of the rank that the config gives. What is not understood is refused, never skipped. Knows nothing of pages.
"""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import NoReturn

from weft.adapters.adapter_config import check_scaling, read_config
from weft.adapters.base_shape import MODULE_PATHS, BaseShape
from weft.adapters.ref import LoraSpec
from weft.adapters.safetensors_header import TensorEntry, read_header
from weft.adapters.tensor_names import Part, TensorNames, TensorPlace
from weft.adapters.value_scan import scan_values as scan
from weft.errors import AdapterFormatError, AdapterIncompatibleError


@dataclass(frozen=True, slots=True)
class LoraTensor:
    """One matrix of the file."""

    layer: int
    module: int
    """Index into `BaseShape.modules`."""
    part: Part
    """`a`: [rank, in]; `b`: [out, rank]."""
    shape: tuple[int, int]
    dtype: str
    """F32, F16 or BF16, little-endian."""
    start: int
    """First byte, counted from the start of the file."""
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """An adapter that was checked and can be served."""

    spec: LoraSpec
    tensors: tuple[LoraTensor, ...]
    """Ordered by layer, module, part."""
    ranks: dict[tuple[int, int], int]
    """True rank by (layer, module index); modules that are not touched are absent."""
    scalings: dict[tuple[int, int], float]
    """What B @ A is multiplied with, by (layer, module index)."""
    parameters: int
    """Numbers in all tensors."""
    largest_rank: int
    target_modules: tuple[str, ...]
    """Names of the modules that are changed in some layer, in table order: `q_proj`, ..."""
    applied: int
    """Linear layers that the adapter changes."""
    total: int
    """Linear layers that adapters of this base may change; without a base, of as many layers as the file reaches."""


def read_checkpoint(
    config_bytes: bytes, weights: Path, base: BaseShape | None, max_rank: int, scan_values: bool = True
) -> Checkpoint:
    """Read and check `adapter_config.json` and `adapter_model.safetensors`.

    Args:
        config_bytes: The config file.
        weights: The weights file; links are not followed.
        base: Shape of the base model; None checks sizes only against each other.
        max_rank: Largest rank that is served.
        scan_values: Whether to look at every value; only a file that was scanned before may go without.

    Raises:
        PayloadTooLargeError: The config is longer than 64 KiB.
        AdapterFormatError: Not what PEFT writes; codes `config.*` and `weights.*`.
        AdapterIncompatibleError: Sound, but not for this base or not served; codes `config.*` and `weights.*`.
        OSError: The weights cannot be opened or read.
    """
    spec = read_config(config_bytes, max_rank)
    with _open_plain(weights) as file:
        tensors = read_header(file, os.fstat(file.fileno()).st_size)
        checkpoint = _check_tensors(spec, tensors, base)
        if scan_values:
            scan(file, tensors)
    return checkpoint


def check_weights(
    spec: LoraSpec, header: bytes, file_size: int, base: BaseShape, pause: Callable[[], None] = lambda: None
) -> Checkpoint:
    """Check the tensors of a weights file that was accepted once, by its header; values are not looked at again.

    Args:
        spec: The config, as it was read then.
        header: The file's beginning, up to its first tensor.
        file_size: Bytes of the whole file.
        base: Shape of the base model.
        pause: Called between pieces of a few milliseconds.

    Raises:
        AdapterFormatError: Not what PEFT writes; codes `config.*` and `weights.*`.
        AdapterIncompatibleError: Sound, but not for this base; codes `weights.*`.
    """
    tensors = read_header(io.BytesIO(header), file_size)
    pause()
    return _check_tensors(spec, tensors, base)


def _open_plain(path: Path) -> BufferedReader:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        _refuse("not_safetensors", "The weights are not a plain file.")
    return open(fd, "rb")


def _check_tensors(spec: LoraSpec, tensors: Sequence[TensorEntry], base: BaseShape | None) -> Checkpoint:
    placed = _place(tensors, base)
    pairs = _pair(placed)
    prefix = base.layer_prefix if base else "model.layers"
    widths: dict[int, tuple[int, int]] = {}
    if base:
        widths = {index: (module.in_features, module.out_features) for index, module in enumerate(base.modules)}
    ranks: dict[tuple[int, int], int] = {}
    scalings: dict[tuple[int, int], float] = {}
    for (layer, module), (lora_a, lora_b) in sorted(pairs.items()):
        path = f"{prefix}.{layer}.{MODULE_PATHS[module]}"
        # Without a base, the first layer that touches a module says how wide it is.
        width_in, width_out = widths.setdefault(module, (lora_a.shape[-1], lora_b.shape[0]))
        rank = spec.module_rank(path)
        _check_shape(lora_a, (rank, width_in), rank_axis=0)
        _check_shape(lora_b, (width_out, rank), rank_axis=1)
        ranks[layer, module] = rank
        scalings[layer, module] = check_scaling(spec.module_scaling(path), path)
    modules = sorted({module for _, module in ranks})
    num_layers = base.num_layers if base else max(layer for layer, _ in ranks) + 1
    return Checkpoint(
        spec=spec,
        tensors=tuple(_lora_tensor(place, placed[place]) for place in sorted(placed)),
        ranks=ranks,
        scalings=scalings,
        parameters=sum(rank * sum(widths[module]) for (_, module), rank in ranks.items()),
        largest_rank=max(ranks.values()),
        target_modules=tuple(MODULE_PATHS[module].rsplit(".", 1)[-1] for module in modules),
        applied=len(ranks),
        total=num_layers * (len(base.modules) if base else len(MODULE_PATHS)),
    )


def _place(tensors: Sequence[TensorEntry], base: BaseShape | None) -> dict[TensorPlace, TensorEntry]:
    names = TensorNames(base)
    placed: dict[TensorPlace, TensorEntry] = {}
    for tensor in tensors:
        place = names.place(tensor.name)
        if place in placed:
            _refuse(
                "duplicate_tensor",
                f"Tensors {placed[place].name} and {tensor.name} are the same matrix in two spellings. Keep one.",
            )
        if len(tensor.shape) != 2 or 0 in tensor.shape:
            _refuse_degenerate(tensor)
        placed[place] = tensor
    return placed


def _refuse_degenerate(tensor: TensorEntry) -> NoReturn:
    mend = ""
    if 0 in tensor.shape:
        mend = (
            " Training with DeepSpeed ZeRO-3 saves empty tensors unless the parameters are gathered first: save again "
            "with stage3_gather_16bit_weights_on_model_save."
        )
    _refuse(
        "shape_invalid",
        f"Tensor {tensor.name} has shape {list(tensor.shape)}; expected two extents of at least 1.{mend}",
    )


def _pair(
    placed: Mapping[TensorPlace, TensorEntry],
) -> dict[tuple[int, int], tuple[TensorEntry, TensorEntry]]:
    pairs = {}
    for place, tensor in placed.items():
        other = placed.get(place._replace(part="b" if place.part == "a" else "a"))
        if other is None:
            _refuse(
                "pair_incomplete",
                f"Tensor {tensor.name} has no partner: each module needs lora_A and lora_B. Save the adapter again.",
            )
        pairs[place.layer, place.module] = (tensor, other) if place.part == "a" else (other, tensor)
    return pairs


def _check_shape(tensor: TensorEntry, expected: tuple[int, int], rank_axis: int) -> None:
    if tensor.shape == expected:
        return
    got = list(tensor.shape)
    width_axis = 1 - rank_axis
    if tensor.shape[width_axis] == expected[width_axis]:
        raise AdapterFormatError(
            f"Tensor {tensor.name} has shape {got}, so rank {got[rank_axis]}; the config gives this module rank "
            f"{expected[rank_axis]}. Mend r or rank_pattern: they must say what was trained.",
            code="weights.rank_mismatch",
        )
    transposed = " It looks transposed." if tensor.shape[rank_axis] == expected[width_axis] else ""
    raise AdapterIncompatibleError(
        f"Tensor {tensor.name} has shape {got}, expected {list(expected)}.{transposed} The adapter was probably "
        "trained on another base model.",
        code="weights.shape_mismatch",
    )


def _lora_tensor(place: TensorPlace, tensor: TensorEntry) -> LoraTensor:
    rows, columns = tensor.shape
    return LoraTensor(place.layer, place.module, place.part, (rows, columns), tensor.dtype, tensor.start, tensor.end)


def _refuse(code: str, message: str) -> NoReturn:
    raise AdapterFormatError(message, code=f"weights.{code}")
