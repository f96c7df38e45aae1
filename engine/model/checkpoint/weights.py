"""Loading of safetensors into a decoder. Names and shapes must be exact; q, k, v and gate, up become one weight each.

Quantised linear weights become floats, one at a time (`formats`). Reads safetensors only and runs no code of the
checkpoint. Knows nothing of adapters and pages.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from manylora.engine.model.decoder import Decoder, DecoderLayer
from manylora.engine.model.formats import FORMATS, dequantised, int8_rows
from manylora.engine.model.formats.gguf_tensors import GgufTensors
from manylora.engine.model.formats.stored import FLOATS, ExpectedTensor, StoredLinear, shaped
from manylora.engine.model.linear import Linear, make_head, make_linear
from manylora.engine.model.quantisation import Quantisation
from manylora.engine.model.rope import rope_table
from manylora.engine.model.spec import DecoderSpec, expected_tensors
from manylora.engine.model.weight_files import EMBEDDING, HEAD, NORM, weight_files
from manylora.errors import ConfigError
from manylora.kernels.attend import HeadNorms
from manylora.kernels.dispatch import kernels_for
from manylora.kernels.quantised import Int8Weight, side_by_side
from manylora.kernels.weight_format import HEAD_FORMAT, WeightFormat

LEFTOVERS = ("rotary_emb.inv_freq", ".k_scale", ".v_scale")
"""Endings of tensors without effect. The first follows from the config; the others are for a KV cache in 8 bits."""


def base_digest(folder: Path) -> str:
    """`sha256:<64 hex>` of a checkpoint: its config, and the sizes and digests of its weight files."""
    content: list[object] = [1, hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()]
    for path in weight_files(folder):
        with path.open("rb") as file:
            content.append([path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()])
    return "sha256:" + hashlib.sha256(json.dumps(content).encode()).hexdigest()


def load_decoder(
    folder: Path,
    spec: DecoderSpec,
    dtype: torch.dtype,
    device: torch.device,
    *,
    weights: WeightFormat = "bf16",
    num_positions: int | None = None,
) -> Decoder:
    """Load a checkpoint.

    Args:
        folder: Folder with the safetensors files.
        spec: Spec of the checkpoint in that folder.
        dtype: Dtype that the weights are converted to.
        device: Device of the decoder.
        weights: Format of the linear layers. They are rounded as they are read, one after another.
        num_positions: Number of positions that will be used; None takes the model's own limit.

    Raises:
        ConfigError: A tensor is missing, unexpected, or of a wrong shape or kind. The message names it.
    """
    kernels = kernels_for(device, dtype)
    with ExitStack() as stack:
        checkpoint = _Checkpoint(stack, weight_files(folder), spec, dtype, device, weights)
        checkpoint.check()
        embedding = checkpoint.embedding()
        head = (
            embedding
            if spec.is_tied
            else checkpoint.weight(HEAD, "bf16" if weights == "bf16" else HEAD_FORMAT)
        )
        return Decoder(
            spec=spec,
            kernels=kernels,
            embedding=embedding,
            layers=[
                _load_layer(checkpoint, spec, f"model.layers.{index}.")
                for index in range(spec.num_layers)
            ],
            norm=checkpoint.tensor(NORM),
            head=make_head(head, weights),
            rope=rope_table(spec.rope, spec.head_dim, num_positions or spec.max_positions, device),
        )


def check_checkpoint(folder: Path, spec: DecoderSpec) -> None:
    """Refuse a checkpoint whose tensors do not fit the spec. No tensor is read.

    Raises:
        ConfigError: As in `load_decoder`.
    """
    with ExitStack() as stack:
        _Checkpoint(
            stack, weight_files(folder), spec, torch.float32, torch.device("cpu"), "bf16"
        ).check()


class _Checkpoint:
    """The tensors of all files of a checkpoint by name."""

    def __init__(
        self,
        stack: ExitStack,
        files: Iterable[Path],
        spec: DecoderSpec,
        dtype: torch.dtype,
        device: torch.device,
        weights: WeightFormat,
    ) -> None:
        self._spec = spec
        self._dtype = dtype
        self._device = device
        self._weights = weights
        self._files: dict[str, Any] = {}
        self._quantised: dict[str, tuple[StoredLinear, tuple[str, ...]]] = {}
        """Linear without its tensors, and the names of these, by the name of the weight."""
        for path in files:
            try:
                file = (
                    GgufTensors(path, spec)
                    if path.suffix == ".gguf"
                    else stack.enter_context(safe_open(path, "pt"))
                )
            except (SafetensorError, OSError) as error:
                raise ConfigError(
                    f"model.path: cannot read {path}: {error}", param="model.path"
                ) from error
            for name in file.keys():  # noqa: SIM118 - the file is no dict
                if name in self._files:
                    raise ConfigError(
                        f"model.path: tensor {name} is in two files", param="model.path"
                    )
                self._files[name] = file

    def check(self) -> None:
        """Refuse tensors that do not fit the spec; the error names them."""
        spec = self._spec
        expected = {name: shaped(FLOATS, *shape) for name, shape in expected_tensors(spec).items()}
        if self._has_head_alone:
            expected[HEAD] = expected.pop(EMBEDDING)
        if spec.quantisation is not None and spec.quantisation.layout in FORMATS:
            self._expect_quantised(spec.quantisation, expected)
        missing = sorted(expected.keys() - self._files.keys())
        if missing:
            raise ConfigError(
                f"model.path: the checkpoint lacks {_listed(missing)}", param="model.path"
            )
        harmless = {HEAD} if spec.is_tied else set()  # an equal copy of the embedding
        unexpected = sorted(
            name
            for name in self._files.keys() - expected.keys() - harmless
            if not name.endswith(LEFTOVERS)
        )
        if unexpected:
            raise ConfigError(
                f"model.path: the checkpoint has tensors that {spec.architecture} does not: {_listed(unexpected)}",
                param="model.path",
            )
        for name, part in expected.items():
            self._check_part(name, part)

    def _expect_quantised(
        self, quantisation: Quantisation, expected: dict[str, ExpectedTensor]
    ) -> None:
        """Expect the parts of each linear in place of its weight, unless that is stored in floats."""
        for name, part in list(expected.items()):
            is_linear = len(part.shapes[0]) == 2 and name != EMBEDDING
            if not is_linear or (
                name in self._files and self._files[name].get_slice(name).get_dtype() in FLOATS
            ):
                continue
            rows, columns = part.shapes[0]
            linear = StoredLinear(name.removesuffix(".weight"), rows, columns, quantisation)
            others = (
                other
                for other in self._files
                if other.startswith(f"{linear.name}.") and other not in expected
            )
            stored = {other[len(linear.name) + 1 :] for other in others}
            parts = {
                suffix: entry
                for suffix, entry in FORMATS[quantisation.layout].parts(linear, stored).items()
                if suffix in stored or not entry.is_optional
            }
            del expected[name]
            expected |= {f"{linear.name}.{suffix}": entry for suffix, entry in parts.items()}
            self._quantised[name] = (linear, tuple(parts))

    def _check_part(self, name: str, part: ExpectedTensor) -> None:
        entry = self._files[name].get_slice(name)
        dtype = entry.get_dtype()
        shape = tuple(entry.get_shape())
        if dtype not in part.dtypes or (part.shapes and shape not in part.shapes):
            kind = "float" if part.dtypes == FLOATS else " or ".join(part.dtypes)
            shapes = " or ".join(str(list(shape)) for shape in part.shapes)
            raise ConfigError(
                f"model.path: {name} must be a {kind} tensor of shape {shapes or '[any]'}, got {dtype} {list(shape)}",
                param="model.path",
            )

    @property
    def _has_head_alone(self) -> bool:
        """True if the embedding of a tied checkpoint is stored under the head's name."""
        return self._spec.is_tied and EMBEDDING not in self._files and HEAD in self._files

    def embedding(self) -> torch.Tensor:
        return self.tensor(HEAD if self._has_head_alone else EMBEDDING)

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        return tensor.to(self._device, dtype or self._dtype, copy=True).contiguous()

    def weight(self, name: str, kept: WeightFormat) -> torch.Tensor | Int8Weight:
        """The weight of a linear in `dtype`. If it is kept in fewer bits, it is in float32 or as it is stored."""
        dtype = self._dtype if kept == "bf16" else torch.float32
        if name not in self._quantised:
            return self.tensor(name, dtype)
        linear, parts = self._quantised[name]
        tensors = {
            part: self._files[f"{linear.name}.{part}"].get_tensor(f"{linear.name}.{part}")
            for part in parts
        }
        stored = replace(linear, tensors=tensors)
        if kept == "int8" and (rows := int8_rows(stored)) is not None:
            return rows
        return dequantised(stored).to(self._device, dtype).contiguous()

    def linear(self, prefix: str, names: tuple[str, ...], has_bias: bool) -> Linear:
        """Join the linears `names` to one whose outputs are side by side."""
        weight = side_by_side(
            [self.weight(f"{prefix}{name}.weight", self._weights) for name in names]
        )
        bias = (
            torch.cat([self.tensor(f"{prefix}{name}.bias") for name in names]) if has_bias else None
        )
        return make_linear(weight, bias, self._weights)


def _load_layer(checkpoint: _Checkpoint, spec: DecoderSpec, prefix: str) -> DecoderLayer:
    attention = f"{prefix}self_attn."
    mlp = f"{prefix}mlp."
    return DecoderLayer(
        input_norm=checkpoint.tensor(f"{prefix}input_layernorm.weight"),
        qkv=checkpoint.linear(attention, ("q_proj", "k_proj", "v_proj"), spec.qkv_bias),
        head_norms=HeadNorms(
            checkpoint.tensor(f"{attention}q_norm.weight"),
            checkpoint.tensor(f"{attention}k_norm.weight"),
            spec.norm_eps,
        )
        if spec.qk_norm
        else None,
        o=checkpoint.linear(attention, ("o_proj",), spec.o_bias),
        post_norm=checkpoint.tensor(f"{prefix}post_attention_layernorm.weight"),
        gate_up=checkpoint.linear(mlp, ("gate_proj", "up_proj"), spec.mlp_bias),
        down=checkpoint.linear(mlp, ("down_proj",), spec.mlp_bias),
    )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more
