"""The stored tensors of one quantised linear, and the reading that formats share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from manylora.engine.model.quantisation import Quantisation
from manylora.errors import ConfigError

FLOATS = ("F64", "F32", "BF16", "F16")
WORDS = ("I32",)
WHOLE = ("I32", "I64")
OCTETS = ("U8",)
WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class ExpectedTensor:
    """Dtypes and shapes that a stored tensor may have."""

    dtypes: tuple[str, ...]
    """Allowed dtypes, as safetensors names them."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """Allowed shapes; empty allows any."""
    is_optional: bool = False
    """True if it need not be stored."""


def shaped(dtypes: tuple[str, ...], *shape: int, is_optional: bool = False) -> ExpectedTensor:
    """Expect a tensor of one shape."""
    return ExpectedTensor(dtypes, (shape,), is_optional)


@dataclass(frozen=True, slots=True)
class StoredLinear:
    """A linear with a quantised weight."""

    name: str
    """Path of the module, such as `model.layers.0.self_attn.q_proj`."""
    out_features: int
    in_features: int
    quantisation: Quantisation
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Tensors on the CPU once they are read, by the name after the linear's name and a dot. They are as expected."""

    @property
    def num_groups(self) -> int:
        """Number of groups of inputs. Each has a scale for each output."""
        return -(-self.in_features // self.group_size)

    @property
    def group_size(self) -> int:
        """Inputs of a group."""
        return (
            min(self.quantisation.block[1], self.in_features)
            if self.quantisation.block
            else self.in_features
        )

    def __getitem__(self, part: str) -> torch.Tensor:
        return self.tensors[part]

    def error(self, part: str, problem: str) -> ConfigError:
        """An error about one part."""
        return ConfigError(f"model.path: {self.name}.{part} {problem}", param="model.path")

    def by_groups(
        self, values: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, order: str = ""
    ) -> torch.Tensor:
        """Compute the weight `(values - zeros) * scales`, float32 [out_features, in_features].

        Args:
            values: [out_features, in_features].
            zeros: [out_features, num_groups].
            scales: [out_features, num_groups].
            order: Part with the group of each input. If it is not stored, neighbours form a group.

        Raises:
            ConfigError: An input is in a group without a scale.
        """
        groups = torch.arange(self.in_features) // self.group_size
        if order in self.tensors:
            groups = self[order].long()
            if groups.min() < 0 or groups.max() >= self.num_groups:
                raise self.error(order, f"must have groups from 0 to {self.num_groups - 1}")
        return (values - zeros.float().index_select(1, groups)) * scales.float().index_select(
            1, groups
        )


def is_finite(tensor: torch.Tensor) -> bool:
    """True if no value is infinite or NaN. Both show in minimum and maximum, which are 20 times faster to compute."""
    return not tensor.numel() or bool(torch.stack(tensor.float().aminmax()).isfinite().all())


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Split words of 32 bits into whole numbers of `bits` bits, the lowest first.

    Args:
        words: int32 [rows, columns].
        bits: 4 or 8.

    Returns:
        uint8 [rows, columns * 32 / bits].
    """
    octets = words.contiguous().view(torch.uint8)
    return octets if bits == 8 else torch.stack((octets & 15, octets >> 4), -1).flatten(-2)


def pack(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack whole numbers of `bits` bits into words, the inverse of `unpack`. The columns need not fill a word.

    Args:
        values: int32 [rows, columns], from 0 to 2 ** bits - 1.
        bits: 4 or 8.
    """
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32)
    values = torch.nn.functional.pad(values, (0, -values.shape[1] % len(shifts)))
    return (values.reshape(len(values), -1, len(shifts)) << shifts).sum(-1, dtype=torch.int32)
