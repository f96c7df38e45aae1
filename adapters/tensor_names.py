"""Which tensor of a LoRA file is which: exact names, and the harmless ways in which exporters spell them.

Knows nothing of shapes and values.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from weft.adapters.base_shape import MODULE_PATHS, BaseShape
from weft.errors import AdapterIncompatibleError

Part = Literal["a", "b"]

MAX_LAYERS = 1024
"""Layers that are looked at when no base is given."""
_ROOT = "base_model.model."
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module")
_LORA = re.compile(r"(?P<path>.+)\.lora_(?P<part>[AB])\.weight")
_LAYER = re.compile(r"base_model\.model\.model\.layers\.(?P<layer>0|[1-9][0-9]{0,3})\.(?P<path>[A-Za-z_.]+)")
_HINTS = (
    ("lora_magnitude_vector", "It belongs to DoRA: retrain with use_dora=false."),
    ("base_layer", "It is a copy of a base weight: save with save_embedding_layers=False, and target no embeddings."),
    ("modules_to_save", "It is a copy of a base module: retrain with modules_to_save=null."),
    ("lora_embedding_", "It changes the embedding: leave embed_tokens out of target_modules and retrain."),
    ("token_adapter", "It changes single token embeddings: retrain without trainable_token_indices."),
    ("trainable_tokens", "It changes single token embeddings: retrain without trainable_token_indices."),
    ("embed_tokens", "The embedding is the base's: leave it out of target_modules and modules_to_save."),
    ("lm_head", "The output head is the base's: leave it out of target_modules and modules_to_save."),
    ("ia3_", "It belongs to IA3: retrain as LoRA."),
    (".bias", 'Biases are not served: retrain with bias="none".'),
    ("qkv", "It belongs to a fused layer: split it into q_proj, k_proj and v_proj."),
    ("gate_up_proj", "It belongs to a fused layer: split it into gate_proj and up_proj."),
    ("experts", "Mixture-of-experts layers are not served."),
)


class TensorPlace(NamedTuple):
    """What a tensor is."""

    layer: int
    module: int
    """Index into `MODULE_PATHS`."""
    part: Part


class TensorNames:
    """The names that a file for one base may use."""

    def __init__(self, base: BaseShape | None) -> None:
        """Build the list of allowed names.

        Args:
            base: None allows the layers 0 to 1023 of any model with the usual module names.
        """
        self._num_layers = MAX_LAYERS if base is None else base.num_layers
        self._modules = {path: index for index, path in enumerate(MODULE_PATHS)}
        self._allowed: dict[str, TensorPlace] | None = None
        if base is not None:
            parts: tuple[tuple[Part, str], ...] = (("a", "lora_A"), ("b", "lora_B"))
            self._modules = {module.path: index for index, module in enumerate(base.modules)}
            self._allowed = {
                f"{_ROOT}{base.layer_prefix}.{layer}.{path}.{lora}.weight": TensorPlace(layer, index, part)
                for layer in range(base.num_layers)
                for path, index in self._modules.items()
                for part, lora in parts
            }

    def place(self, name: str) -> TensorPlace:
        """What the tensor `name` is.

        Raises:
            AdapterIncompatibleError: A LoRA file for this base may not hold it (weights.tensor_not_allowed).
        """
        place = self._look_up(canonical_name(name))
        if place is None:
            raise AdapterIncompatibleError(
                f"Tensor {name} is not allowed in an adapter. {self._mend(name)}", code="weights.tensor_not_allowed"
            )
        return place

    def _look_up(self, name: str) -> TensorPlace | None:
        if self._allowed is not None:
            return self._allowed.get(name)
        lora = _LORA.fullmatch(name)
        layer = _LAYER.fullmatch(lora["path"]) if lora else None
        if lora is None or layer is None or layer["path"] not in self._modules or int(layer["layer"]) >= MAX_LAYERS:
            return None
        return TensorPlace(int(layer["layer"]), self._modules[layer["path"]], "a" if lora["part"] == "A" else "b")

    def _mend(self, name: str) -> str:
        for part, hint in _HINTS:
            if part in name:
                return hint
        return (
            f"Expected {_ROOT}model.layers.<0 to {self._num_layers - 1}>.<module>.lora_A.weight or lora_B.weight with "
            f"<module> one of {', '.join(self._modules)}."
        )


def canonical_name(name: str) -> str:
    """The name as PEFT's save_pretrained writes it.

    Takes away one `_orig_mod.` (torch.compile), one `_fsdp_wrapped_module.` (FSDP) and the adapter name in
    `lora_A.default.weight` (a dumped state dict).
    """
    parts = name.split(".")
    for wrapper in _WRAPPERS:
        if wrapper in parts:
            parts.remove(wrapper)
    if parts[-2:] == ["default", "weight"] and len(parts) > 2 and parts[-3] in ("lora_A", "lora_B"):
        del parts[-2]
    return ".".join(parts)
