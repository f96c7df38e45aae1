"""Parts that the cases of a verb share: the device, its best speed, and a model of random weights to run on it."""

from __future__ import annotations

import gc
import json
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar
from unittest.mock import patch

import torch

from manylora import demo
from manylora.adapters.ref import AdapterRef
from manylora.benchmarks.engine.kernels import KernelBench, Machine, measure_machine
from manylora.benchmarks.engine.own_engine import OwnEngine
from manylora.benchmarks.model_shapes import ALL_LINEAR, MODELS, QWEN, ModelShape
from manylora.benchmarks.qwen_shape import save_random_adapter
from manylora.benchmarks.report import Figures
from manylora.config import KvDtype
from manylora.engine.model.checkpoint import weights as weights_module
from manylora.engine.model.checkpoint.weights import _Checkpoint
from manylora.engine.model.spec import expected_tensors

N = TypeVar("N", int, float)
TINY = ModelShape("tiny", num_layers=2, hidden=64, intermediate=160, num_heads=4, num_kv_heads=2)
MAX_TOKENS = 1 << 18
"""Most tokens whose keys and values attention is timed with: 32 GiB of the 8B shape."""
MAX_RUNNING = 64
"""Rows of a full batch."""
_QUERY = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.draw,temperature.gpu,memory.used,memory.total"


@dataclass(kw_only=True, eq=False)
class Setup:
    """The device and data of the cases of a verb. The large parts are made when the first case wants them."""

    device: torch.device
    out: Path
    """Folder of the results."""
    is_tiny: bool = False
    """True if sizes are those of a toy, so that the verbs can be tested on a CPU."""
    is_eager: bool = False
    """True if the engine launches each kernel of a decode step, and replays no CUDA graphs."""
    kv_dtype: KvDtype = "auto"
    """Type of the keys and values of operations."""
    jobs: int = 1
    """Processes for tests."""
    seconds: float = 540.0
    """Time for a verb."""
    stack: ExitStack = field(default_factory=ExitStack)
    """Closes the engine and deletes its files when the verb ends."""

    def sized(self, full: N, tiny: N) -> N:
        """A size of the real run, or of the toy."""
        return tiny if self.is_tiny else full

    @property
    def has_goals(self) -> bool:
        """True if the goals count: they are those of a GPU, and the toy tries them out."""
        return self.is_tiny or self.device.type == "cuda"

    @property
    def model(self) -> ModelShape:
        """The shape of all operations and steps."""
        real = MODELS[0] if self.device.type == "cuda" else QWEN
        return TINY if self.is_tiny else real

    @property
    def vocab_size(self) -> int:
        """Tokens that the model knows."""
        return self.sized(128_256, 512)

    @cached_property
    def machine(self) -> Machine:
        """The best speed of the device."""
        real = (1 << 32, 8192) if self.device.type == "cuda" else (1 << 28, 1536)
        return measure_machine(self.device, *((1 << 22, 128) if self.is_tiny else real))

    @cached_property
    def bench(self) -> KernelBench:
        """The operations of a step and their data."""
        pages = MAX_TOKENS // self.model.geometry(kv_dtype=self.kv_dtype).page_tokens
        return KernelBench(self.model, self.device, pages + 1, self.kv_dtype)

    @cached_property
    def folder(self) -> Path:
        """Has the config of the model and the files of adapters while the verb runs."""
        return Path(self.stack.enter_context(TemporaryDirectory()))

    @cached_property
    def engine(self) -> OwnEngine:
        """The engine as the product builds it, with room for 64 rows of 1,024 tokens and 64 adapters of rank 16.

        Its weights are random numbers that the device makes: no checkpoint is read.
        """
        size = self.sized
        fields = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **self.model.config_fields(),
            "vocab_size": self.vocab_size,
            "tie_word_embeddings": False,
            "max_position_embeddings": 8192,
        }
        model = shutil.copytree(demo.MODEL, self.folder / "model")  # for its tokenizer
        (model / "config.json").write_text(json.dumps(fields))
        with (
            patch.multiple(weights_module._Checkpoint, check=lambda _: None, tensor=random_tensor),
            patch.object(weights_module, "weight_files", lambda _: []),
        ):
            engine = OwnEngine(
                model,
                device="cpu" if self.is_tiny else "cuda",
                dtype="bfloat16",
                cuda_graphs=not self.is_eager,
                memory_gib=size(16.0, 1 / 128),
                host_gib=size(20.0, 1 / 16),
                prefix_cache=False,
                max_running=MAX_RUNNING,
                step_tokens=size(2048, 256),
                max_rank=64,
            )
        return self.stack.enter_context(engine)

    def adapters(self, ranks: Sequence[int], count: int) -> list[AdapterRef]:
        """Different adapters of these ranks in turn, random in all linear layers."""
        folders = [self.folder / f"rank-{rank}" for rank in ranks]
        for folder, rank in zip(folders, ranks, strict=True):
            save_random_adapter(folder, self.model.base(), ALL_LINEAR, rank, seed=rank)
        return self.engine.store_adapters(folders, count)


def random_tensor(
    checkpoint: _Checkpoint, name: str, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Stands for `_Checkpoint.tensor`: ones where norms are, normally distributed numbers elsewhere."""
    shape = expected_tensors(checkpoint._spec)[name]
    made = torch.randn(shape, dtype=dtype or checkpoint._dtype, device=checkpoint._device)
    return made.fill_(1.0) if made.dim() == 1 else made.mul_(0.02)


def release(device: torch.device) -> bool:
    """Give memory back that nothing refers to any more; returns whether the device still works."""
    gc.collect()
    if device.type == "cuda":
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError:
            return False
    return True


def describe_device(device: torch.device) -> Figures:
    """The name of a GPU, and its driver, clocks, power and temperature as they are now."""
    if device.type != "cuda":
        return {"gpu": None}
    query = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv"]
    told = (
        subprocess.run(query, capture_output=True, text=True, check=False).stdout
        if shutil.which(query[0])
        else ""
    )
    return {
        "gpu": torch.cuda.get_device_name(device),
        "cuda": torch.version.cuda,
        "nvidia_smi": told.splitlines(),
    }
