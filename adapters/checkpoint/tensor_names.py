"""Names of the tensors of a LoRA file: exact names, and the harmless ways in which exporters spell them.

Knows nothing of shapes and values.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from manylora.adapters.base_shape import MODULE_PATHS, BaseShape
from manylora.errors import AdapterIncompatibleError

LoraPart = Literal["a", "b"]
Layout = Literal["peft", "mlx"]

MAX_LAYERS = 1024
"""Number of layers that may be named when no base is given."""
_ROOT = "base_model.model."
_DDP = "module."
_WRAPPERS = frozenset(
    {"_orig_mod", "_fsdp_wrapped_module", "_fpw_module", "_checkpoint_wrapped_module"}
)
"""Modules that torch.compile, FSDP and activation checkpointing wrap around others, at any place and several times."""
_STEMS = ("{}", "model.language_{}", "language_model.{}")
"""Paths of the layers in a multimodal model; `{}` is their path in the base (`model.layers`)."""
_LAYER = r"(?P<stem>[A-Za-z_.]+)\.(?P<layer>0|[1-9][0-9]{0,3})\.(?P<path>[A-Za-z_.]+)"
_SPELLINGS: tuple[tuple[Layout, re.Pattern[str]], ...] = (
    (
        "peft",
        re.compile(
            rf"base_model\.model\.{_LAYER}\.lora_(?P<part>[AB])(?:\.(?P<adapter>[A-Za-z0-9_-]+))?\.weight"
        ),
    ),
    ("mlx", re.compile(rf"{_LAYER}\.lora_(?P<part>[ab])")),
)
_ANY_LORA = re.compile(
    r"(?:base_model\.model\.)?(?P<stem>[A-Za-z_.]+)\.(?P<layer>[0-9]{1,9})\.(?P<path>[A-Za-z_.]+)\.lora_[ABab](?:\.weight)?"
)
_WHOLE_MODEL = re.compile(
    r"(?!.*(?:lora|base_layer|v_head))(?:model|lm_head|transformer|gpt_neox)\.[A-Za-z0-9_.]*(?:weight|bias)"
)
_SAVE_ADAPTER_ALONE = (
    "It is a weight of a whole model, perhaps with the adapter merged into it: call PEFT's save_pretrained on the "
    "PeftModel, before merge_and_unload, and upload the adapter_model.safetensors that this writes."
)
_VOCABULARY = (
    "LoRA on the embedding or the output head is not served: drop embed_tokens and lm_head from target_modules, and "
    "retrain."
)
_VOCABULARY_COPY = (
    "It is a full copy of the embedding or the output head: retrain without modules_to_save and without resizing the "
    "vocabulary. If neither was done, save again with save_embedding_layers=False."
)
_LORA_BIAS = "It is a bias on lora_B, which is not served: retrain with lora_bias=false."
_MEGATRON = "It belongs to a fused layer of Megatron or NeMo: convert the adapter to the layout of Hugging Face PEFT"
_VISION = "It belongs to the vision model, which is not served: retrain on the language model's layers alone."
_CLASSIFIER = (
    "It belongs to a classification head, and adapters here generate text: retrain for CAUSAL_LM."
)
_HINTS = (
    ("lora_magnitude_vector", "It belongs to DoRA: retrain with use_dora=false."),
    (
        "token_adapter",
        "It changes single token embeddings: retrain without trainable_token_indices.",
    ),
    (
        "trainable_tokens",
        "It changes single token embeddings: retrain without trainable_token_indices.",
    ),
    ("modules_to_save", "It is a copy of a base module: retrain with modules_to_save=null."),
    ("lora_B.bias", _LORA_BIAS),
    ("lora_B.default.bias", _LORA_BIAS),
    (".bias", 'It is a trained bias, which is not served: retrain with bias="none".'),
    ("lora_embedding_", _VOCABULARY),
    ("embed_tokens.lora_", _VOCABULARY),
    ("lm_head.lora_", _VOCABULARY),
    ("embed_tokens", _VOCABULARY_COPY),
    ("lm_head", _VOCABULARY_COPY),
    ("experts", "Mixture-of-experts layers are not served."),
    (
        "base_layer",
        "It is a copy of a base weight: save with PEFT's save_pretrained, which leaves it out.",
    ),
    (
        "v_head",
        "It belongs to a value head, which training alone uses: leave tensors of v_head out of the file.",
    ),
    (".score.", _CLASSIFIER),
    (".classifier.", _CLASSIFIER),
    ("ia3_", "It belongs to IA3: retrain as LoRA."),
    ("linear_qkv", f"{_MEGATRON}, with q_proj, k_proj and v_proj apart."),
    ("linear_fc1", f"{_MEGATRON}, with gate_proj and up_proj apart."),
    ("linear_fc2", f"{_MEGATRON}, where it is down_proj."),
    ("linear_proj", f"{_MEGATRON}, where it is o_proj."),
    ("qkv", "It belongs to a fused layer: split it into q_proj, k_proj and v_proj."),
    ("gate_up_proj", "It belongs to a fused layer: split it into gate_proj and up_proj."),
    ("vision", _VISION),
    ("visual", _VISION),
)


class TensorPlace(NamedTuple):
    """The matrix that a tensor is: layer, module, and A or B."""

    layer: int
    module: int
    """Index into `MODULE_PATHS`."""
    part: LoraPart


class TensorName(NamedTuple):
    """The parts of a tensor's name."""

    place: TensorPlace
    layout: Layout
    """`peft`: A is [rank, in], B is [out, rank]; `mlx`: both are transposed."""
    stem: str
    """Path of the layers in the file's model: the base's `model.layers`, or a path in a multimodal model."""
    written: str
    """Path of the module in the file, wrappers included."""
    adapter: str | None
    """Name of the adapter, if the tensors of a running PEFT model were dumped."""
    is_renamed: bool
    """True if PEFT and MLX spell it in another way."""

    @property
    def rank_axis(self) -> int:
        """Axis of the matrix that is the rank."""
        return int((self.place.part == "b") == (self.layout == "peft"))


class TensorNames:
    """The names that a file for one base may use.

    Args:
        base: None allows the layers 0 to 1023 of any model with the usual module names.
    """

    def __init__(self, base: BaseShape | None) -> None:
        self._num_layers = base.num_layers if base else MAX_LAYERS
        paths = [module.path for module in base.modules] if base else MODULE_PATHS
        self._modules = {path: index for index, path in enumerate(paths)}
        self._stem = base.layer_prefix if base else "model.layers"
        self._stems = {stem.format(self._stem) for stem in _STEMS}

    def read(self, name: str) -> TensorName:
        """Find the matrix that the tensor `name` is.

        Raises:
            AdapterIncompatibleError: A LoRA file for this base may not have it (weights.tensor_not_allowed).
        """
        plain = unwrapped(name)
        for layout, spelling in _SPELLINGS:
            found = spelling.fullmatch(plain if layout == "peft" else name)
            if found and found["stem"] in self._stems and found["path"] in self._modules:
                place = TensorPlace(
                    int(found["layer"]),
                    self._modules[found["path"]],
                    "a" if found["part"] in "aA" else "b",
                )
                adapter = found["adapter"] if layout == "peft" else None
                if place.layer < self._num_layers:
                    is_renamed = plain != name or adapter is not None or found["stem"] != self._stem
                    written = name.rpartition(".lora_")[0].removeprefix(_ROOT)
                    return TensorName(place, layout, found["stem"], written, adapter, is_renamed)
        message = f"Tensor {name} is not allowed in an adapter."
        code = "weights.tensor_not_allowed"
        raise AdapterIncompatibleError(message, code=code, param=name, hint=self._hint(name))

    def _hint(self, name: str) -> str:
        if _WHOLE_MODEL.fullmatch(name):
            return _SAVE_ADAPTER_ALONE
        for part, hint in _HINTS:
            if part in name:
                return hint
        if found := _ANY_LORA.fullmatch(unwrapped(name)):
            if not found["stem"].endswith(tuple(self._stems)):
                return (
                    f"The served model has its layers at {self._stem}, so the adapter was trained on one of another "
                    "family: upload it to a server of that model."
                )
            if found["path"] not in self._modules:
                return f"The served model's layers have no such module: retrain on {', '.join(self._modules)} alone."
            if int(found["layer"]) >= self._num_layers:
                return (
                    f"The served model has layers 0 to {self._num_layers - 1}, so the adapter was trained on a deeper "
                    "one: upload it to a server of that model."
                )
        return (
            f"Expected {_ROOT}{self._stem}.<0 to {self._num_layers - 1}>.<module>.lora_A.weight or lora_B.weight with "
            f"<module> one of {', '.join(self._modules)}. PEFT's save_pretrained names them so."
        )


def unwrapped(name: str) -> str:
    """Remove the wrappers of DDP, torch.compile, FSDP and activation checkpointing from a name."""
    if not any(wrapper in name for wrapper in (_DDP, *_WRAPPERS)):
        return name
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS).removeprefix(_DDP)
