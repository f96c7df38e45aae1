"""An engine around a model of random weights that are made on the device, and random adapters: no large files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import save_file

from weft.benchmarks.engine.own_engine import OwnEngine, own_engine
from weft.benchmarks.engine.stored import random_lora
from weft.benchmarks.gpu.machine import Setup
from weft.benchmarks.model_shapes import ALL_LINEAR
from weft.config import AdapterConfig, Config, MemoryConfig, ModelConfig, SchedulerConfig
from weft.engine.model import weights as weights_module
from weft.engine.model.spec import expected_tensors
from weft.kernels.weight_format import WeightFormat

MAX_POSITIONS = 8192
FORMAT: dict[str, Any] = {"dtype": "bfloat16", "weights": "bf16"}


class RandomCheckpoint(weights_module._Checkpoint):
    """Stands for the tensors of a checkpoint: normally distributed numbers, and ones where norms are.

    Args:
        of_checkpoint: As those of a real one. Its files are not read.
    """

    def __init__(self, *of_checkpoint: Any) -> None:  # noqa: ANN401
        _, _, spec, self._dtype, self._device, self._weights = of_checkpoint
        self._shapes = expected_tensors(spec)
        self._draw = torch.Generator(self._device).manual_seed(0)

    def check(self) -> None:
        """There is nothing to refuse."""

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor of the checkpoint, made anew."""
        shape, kind = self._shapes[name], {"dtype": dtype or self._dtype, "device": self._device}
        if len(shape) == 1:
            return torch.ones(shape, **kind)  # type: ignore[call-overload, no-any-return]
        return torch.randn(shape, generator=self._draw, **kind).mul_(0.02)  # type: ignore[call-overload, no-any-return]

    def weight(self, name: str, kept: WeightFormat) -> torch.Tensor:
        """The weight of a linear layer."""
        return self.tensor(name, self._dtype if kept == "bf16" else torch.float32)


@contextmanager
def random_engine(
    setup: Setup, memory: MemoryConfig, scheduler: SchedulerConfig, model: Mapping[str, Any] | None = None
) -> Iterator[OwnEngine]:
    """The engine as the product builds it, in bfloat16.

    Args:
        setup: Says of what shape the model is.
        memory: Settings of this section.
        scheduler: Likewise.
        model: Further settings of its section.
    """
    folder = setup.scratch
    folder.mkdir(exist_ok=True)
    fields = setup.model.config_fields() | {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": setup.vocab_size,
        "tie_word_embeddings": False,
        "max_position_embeddings": MAX_POSITIONS,
    }
    (folder / "config.json").write_text(json.dumps(fields))
    config = Config(
        model=ModelConfig(path=str(folder), **{**FORMAT, "device": setup.device.type, **(model or {})}),
        memory=memory,
        scheduler=scheduler,
        adapter=AdapterConfig(max_rank=64),
    )
    with (
        patch.object(weights_module, "_Checkpoint", RandomCheckpoint),
        patch.object(weights_module, "weight_files", lambda _: []),
        own_engine(config) as engine,
    ):
        yield engine


def adapter_folder(setup: Setup, rank: int) -> Path:
    """Folder of a random adapter on all linear layers; made if it is not there."""
    folder, base = setup.scratch / f"rank-{rank}", setup.model.base()
    if not folder.exists():
        folder.mkdir(parents=True)
        tensors = random_lora(base, ALL_LINEAR, rank, torch.Generator().manual_seed(rank))
        save_file(tensors, folder / "adapter_model.safetensors")
        targets = [base.modules[module].name for module in ALL_LINEAR]
        fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": targets}
        (folder / "adapter_config.json").write_text(json.dumps(fields | {"task_type": "CAUSAL_LM"}))
    return folder
