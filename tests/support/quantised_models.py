"""Writers of quantised checkpoints that share no code with the readers: bits are set one by one, weights are
dequantised from whole numbers that were never packed. And what models made from them are compared with.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from tiny_models import ALL_LINEAR, load_reference, prompt, reference_logits

Tensors = dict[str, torch.Tensor]
Encoded = tuple[Tensors, torch.Tensor]
"""The stored tensors of a linear, and its weight as they say it, float32."""
Encode = Callable[[torch.Tensor], Encoded]
WEIGHTS = "model.safetensors"
TOLERANCE = 1e-3
TOKENS = prompt(21, seed=5)
"""A prompt."""


@dataclass(frozen=True)
class QuantisedModel:
    """Two folders with the same model."""

    stored: Path
    """Quantised."""
    decoded: Path
    """What the quantised weights are, in float32."""


def make_quantised(
    source: Path,
    folder: Path,
    config: Mapping[str, Any],
    encode: Encode,
    *,
    plain: tuple[str, ...] = (),
) -> QuantisedModel:
    """Write the model in `source` quantised, and in floats, into two folders below `folder`.

    Args:
        source: A checkpoint in float32, in one file.
        folder: Where to.
        config: The `quantization_config`.
        encode: Quantises the weight of a linear.
        plain: Names of linears that stay in floats, as `v_proj`.
    """
    made = QuantisedModel(folder / "stored", folder / "decoded")
    stored, decoded = Tensors(), Tensors()
    for name, tensor in load_file(source / WEIGHTS).items():
        linear = name.removesuffix(".weight")
        if linear == name or not linear.endswith(ALL_LINEAR) or linear.endswith(plain or ("-",)):
            stored[name] = decoded[name] = tensor
            continue
        parts, decoded[name] = encode(tensor)
        stored.update({f"{linear}.{part}": value for part, value in parts.items()})
    as_checkpoint(source, made.stored, stored)
    as_checkpoint(source, made.decoded, decoded)
    settings = json.loads((source / "config.json").read_text())
    (made.stored / "config.json").write_text(
        json.dumps({**settings, "quantization_config": config})
    )
    return made


def as_checkpoint(source: Path, folder: Path, tensors: Tensors) -> Path:
    """Write `source` with other weights into `folder`, and return `folder`."""
    shutil.copytree(source, folder)
    save_file(
        {name: tensor.contiguous().clone() for name, tensor in tensors.items()},
        folder / WEIGHTS,
        {"format": "pt"},
    )
    return folder


def expected_logits(folder: Path) -> torch.Tensor:
    """What transformers computes for `TOKENS`, [21, V], float32."""
    return reference_logits(load_reference(folder), TOKENS)


@torch.inference_mode()
def expected_logits_of_adapters(folder: Path, adapters: Sequence[Path]) -> list[torch.Tensor]:
    """What PEFT computes for `TOKENS` with each adapter of the model in `folder`."""
    model, logits = load_reference(folder), []
    for adapter in adapters:
        name = adapter.name
        if isinstance(model, PeftModel):
            model.load_adapter(str(adapter), name)
            model.set_adapter(name)
        else:
            model = PeftModel.from_pretrained(model, str(adapter), name).eval()
        logits.append(model(torch.tensor([TOKENS])).logits[0])
    return logits


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare logits."""
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE, atol=TOLERANCE)


def words(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Whole numbers [rows, columns], each from 0 to 2 ** bits - 1, as words of 32 bits, int32, low bits first."""
    array = values.numpy().astype(np.int64)
    ones = ((array[..., None] >> np.arange(bits)) & 1).astype(np.uint8).reshape(len(array), -1)
    padded = np.pad(ones, ((0, 0), (0, -ones.shape[1] % 32)))
    return torch.from_numpy(np.packbits(padded, axis=1, bitorder="little").view("<i4").copy())


@dataclass(frozen=True)
class Grid:
    """A weight rounded to whole numbers, whose value is `(q - zero) * scale`."""

    q: torch.Tensor
    """int64 [out, in]."""
    scale: torch.Tensor
    """[out, groups]."""
    zero: torch.Tensor
    """int64 [out, groups]."""
    group: torch.Tensor
    """Of each input, int64 [in]."""

    @property
    def weight(self) -> torch.Tensor:
        """float32 [out, in]."""
        return ((self.q - self.zero[:, self.group]) * self.scale.double()[:, self.group]).float()


def rounded(
    weight: torch.Tensor,
    bits: int,
    size: int,
    *,
    symmetric: bool = False,
    order: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float16,
) -> Grid:
    """Round a weight to the nearest of 2 ** bits values, per output and group of `size` inputs.

    Args:
        weight: [out, in].
        bits: Of a value.
        size: Inputs that share a scale.
        symmetric: Whether zero is the middle of the range, `2 ** (bits - 1)`.
        order: The inputs in the order in which they are put into groups; None is as they come.
        dtype: Of the scales.
    """
    num_in = weight.shape[1]
    group = torch.empty(num_in, dtype=torch.long)
    group[torch.arange(num_in) if order is None else order] = torch.arange(num_in) // size
    most, scales, zeros = 2**bits - 1, [], []
    for index in range(int(group.max()) + 1):
        part = weight[:, group == index]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if symmetric:
            high = torch.maximum(high, -low)
            low = -high
        scale = ((high - low) / most).to(dtype)
        scales.append(scale)
        middle = torch.full_like(low, 2.0 ** (bits - 1))
        zeros.append(middle if symmetric else (-low / scale.float()).round().clamp(0, most))
    scale, zero = torch.stack(scales, 1), torch.stack(zeros, 1).long()
    q = (weight / scale.float()[:, group] + zero[:, group]).round().clamp(0, most).long()
    return Grid(q, scale, zero, group)
