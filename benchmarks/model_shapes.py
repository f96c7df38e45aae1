"""Shapes of models, where sizes are needed and no weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from manylora.adapters.base_shape import MODULE_PATHS, BaseShape
from manylora.config import KvDtype
from manylora.engine.model.spec import DecoderSpec, base_shape, decoder_spec, model_geometry
from manylora.memory.geometry import PageGeometry

DTYPE_BYTES = 2
"""bfloat16, in which these models are served."""

ALL_LINEAR = tuple(range(len(MODULE_PATHS)))
QUERY_AND_VALUE = (0, 2)
"""Modules that an adapter changes, in every layer: indices into `MODULE_PATHS`."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a model, as its config.json has them."""

    name: str
    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int

    @property
    def head_dim(self) -> int:
        """Elements per head."""
        return self.hidden // self.num_heads

    def spec(self) -> DecoderSpec:
        """The description that the engine reads from its config; with one token, on which no size here depends."""
        return decoder_spec(
            {"architectures": ["LlamaForCausalLM"], "vocab_size": 1, **self.config_fields()}
        )

    def base(self) -> BaseShape:
        """The shape that adapters are checked against."""
        return base_shape(self.spec(), "")

    def config_fields(self) -> dict[str, Any]:
        """Fields of config.json for a generated checkpoint of these sizes."""
        return {
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": 1,
            "pad_token_id": 0,
        }

    def geometry(self, kv_dtype: KvDtype = "auto") -> PageGeometry:
        """Pages of an arena for it."""
        return model_geometry(self.spec(), self.base(), DTYPE_BYTES, kv_dtype)


QWEN = ModelShape(
    "Qwen2.5-0.5B", num_layers=24, hidden=896, intermediate=4864, num_heads=14, num_kv_heads=2
)
MODELS = (
    ModelShape(
        "Llama-3-8B", num_layers=32, hidden=4096, intermediate=14336, num_heads=32, num_kv_heads=8
    ),
    QWEN,
    ModelShape(
        "Llama-2-7B", num_layers=32, hidden=4096, intermediate=11008, num_heads=32, num_kv_heads=32
    ),
)


def weight_elements(model: ModelShape, vocab_size: int) -> int:
    """Numbers in the linear layers and the head, all of which each step reads once."""
    modules = sum(module.in_features * module.out_features for module in model.base().modules)
    return model.num_layers * modules + vocab_size * model.hidden


def lora_elements(model: ModelShape, ranks: Sequence[int]) -> int:
    """Numbers in adapters of these ranks on all linear layers."""
    of_rank = sum(module.in_features + module.out_features for module in model.base().modules)
    return model.num_layers * sum(ranks) * of_rank


def kv_elements(model: ModelShape, tokens: int) -> int:
    """Numbers in keys and values of this number of tokens."""
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * tokens
