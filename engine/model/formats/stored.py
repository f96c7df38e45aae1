"""The stored tensors of one quantised linear, and what formats share in reading them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from weft.engine.model.quantisation import Quantisation
from weft.errors import ConfigError

FLOATS = ("F64", "F32", "BF16", "F16")
WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class Part:
    """What a stored tensor must be."""

    dtypes: tuple[str, ...]
    """As safetensors names them."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """One of these; none: any."""


@dataclass(frozen=True, slots=True)
class StoredLinear:
    """A linear whose weight is stored quantised."""

    name: str
    """As `model.layers.0.self_attn.q_proj`."""
    out_features: int
    in_features: int
    quantisation: Quantisation
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Once they are read: on the CPU, by what follows the name and a dot. All are as the format's parts say."""

    @property
    def num_groups(self) -> int:
        """Groups of inputs, each of which has a scale for each output."""
        return -(-self.in_features // self.group_size)

    @property
    def group_size(self) -> int:
        """Inputs of a group."""
        return self.quantisation.block[1] if self.quantisation.block else self.in_features

    def __getitem__(self, part: str) -> torch.Tensor:
        return self.tensors[part]

    def error(self, part: str, problem: str) -> ConfigError:
        """An error about one part."""
        return ConfigError(f"model.path: {self.name}.{part} {problem}", param="model.path")

    def groups(self, index: str) -> torch.Tensor:
        """The group of each input, int64 [in_features], from the part `index`, or in order where that is not stored.

        Raises:
            ConfigError: An input is in a group that has no scale.
        """
        if index not in self.tensors:
            return torch.arange(self.in_features) // self.group_size
        groups = self[index].long()
        if groups.min() < 0 or groups.max() >= self.num_groups:
            raise self.error(index, f"must have groups from 0 to {self.num_groups - 1}")
        return groups


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Split words of 32 bits into whole numbers of `bits` bits, the lowest first.

    Args:
        words: int32 [rows, columns].
        bits: A divisor of 32.

    Returns:
        int32 [rows, columns * 32 / bits], from 0 to 2 ** bits - 1.
    """
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(-2)


def pack(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack whole numbers of `bits` bits into words: the inverse of `unpack`, for columns that do not fill a word, too.

    Args:
        values: int32 [rows, columns], from 0 to 2 ** bits - 1.
        bits: A divisor of 32.
    """
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32)
    values = torch.nn.functional.pad(values, (0, -values.shape[1] % len(shifts)))
    return (values.reshape(len(values), -1, len(shifts)) << shifts).sum(-1, dtype=torch.int32)
