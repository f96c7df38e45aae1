"""The tensors of a GGUF file under the names and in the layouts of a Hugging Face checkpoint, dequantised."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from manylora.engine.model.formats.stored import is_finite
from manylora.engine.model.gguf import GGUF_ARCHITECTURES, ROPE_FACTORS, open_gguf
from manylora.engine.model.spec import DecoderSpec, expected_tensors
from manylora.errors import ConfigError


@dataclass(frozen=True, slots=True)
class _TensorHeader:
    """Shape and dtype of a tensor, as safetensors gives them."""

    tensor: Any

    def get_shape(self) -> list[int]:
        return [int(extent) for extent in reversed(self.tensor.shape)]

    def get_dtype(self) -> str:
        name: str = self.tensor.tensor_type.name
        return name if name.startswith(("I8", "I16", "I32", "I64", "F64")) else "F32"


class GgufTensors:
    """A GGUF file with the methods of safetensors' `safe_open`.

    Args:
        path: The file.
        spec: Spec of its model, from `gguf_config`.
    """

    def __init__(self, path: Path, spec: DecoderSpec) -> None:
        from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map

        reader = open_gguf(path)
        arch = next(arch for arch, name in GGUF_ARCHITECTURES.items() if name == spec.architecture)
        mapping = get_tensor_name_map(
            next(a for a in MODEL_ARCH if MODEL_ARCH_NAMES[a] == arch), spec.num_layers
        )
        names = {
            mapping.get_name(name, (".weight", ".bias")): name for name in expected_tensors(spec)
        }
        self._entries = {
            names.get(t.name, t.name): _TensorHeader(t)
            for t in reader.tensors
            if t.name != ROPE_FACTORS
        }
        self._heads = (
            {"q_proj": spec.num_heads, "k_proj": spec.num_kv_heads} if arch == "llama" else {}
        )

    def keys(self) -> Iterator[str]:
        """Names of the tensors. Tensors that the model does not have keep their names in the file."""
        return iter(self._entries)

    def get_slice(self, name: str) -> _TensorHeader:
        """Shape and dtype of a tensor."""
        return self._entries[name]

    def get_tensor(self, name: str) -> torch.Tensor:
        """A tensor in float32.

        Raises:
            ConfigError: It has values that are infinite or NaN, or its type is unknown.
        """
        from gguf import dequantize

        entry = self._entries[name]
        try:
            values = dequantize(entry.tensor.data, entry.tensor.tensor_type)
        except NotImplementedError as error:
            problem = f"is {entry.tensor.tensor_type.name}, which is not served"
            raise ConfigError(f"model.path: {name} {problem}", param="model.path") from error
        tensor = torch.from_numpy(np.array(values, dtype=np.float32)).view(entry.get_shape())
        if not is_finite(tensor):
            raise ConfigError(
                f"model.path: {name} has values that are infinite or NaN", param="model.path"
            )
        num_heads = self._heads.get(name.split(".")[-2], 0)
        if num_heads:
            # llama.cpp rotates neighbours, so it keeps the two halves of a head interleaved.
            halves = tensor.view(num_heads, -1, 2, *tensor.shape[1:])
            tensor = halves.transpose(1, 2).flatten(0, 2)
        return tensor
