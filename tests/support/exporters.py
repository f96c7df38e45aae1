"""Adapters in every form in which training tools leave them, each with the logits that transformers and PEFT give.

PEFT makes all that it can make, torch's own wrappers wrap, and what only other tools write is converted from that.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import (
    EvaConfig,
    LoraConfig,
    PeftConfig,
    PrefixTuningConfig,
    VeraConfig,
    get_peft_model,
    initialize_lora_eva_weights,
)
from peft.tuners.lora import BdLoraConfig, KasaConfig
from safetensors.torch import load_file, save_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from lora_files import MLX_CONFIG
from tiny_models import ALL_LINEAR, prompt

Tensors = dict[str, torch.Tensor]
CONFIG, WEIGHTS, MLX_WEIGHTS = (
    "adapter_config.json",
    "adapter_model.safetensors",
    "adapters.safetensors",
)
ROOT = "base_model.model.model.layers."
PROMPT = prompt(17, seed=3)


def lora(**fields: Any) -> LoraConfig:
    """A LoRA config; rank 8 on q_proj and v_proj unless told otherwise."""
    return LoraConfig(
        **{"r": 8, "task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"], **fields}
    )


def logits(model: Any) -> torch.Tensor:
    """[len(PROMPT), vocab_size] in float32."""
    with torch.inference_mode(), unwarned():
        scores: torch.Tensor = model.eval()(input_ids=torch.tensor([PROMPT])).logits[0]
    return scores.float()


def trained(base: Any, config: PeftConfig, name: str = "default", parts: str = "lora_") -> Any:
    """PEFT's model of `base` with random weights where names hold `parts`; its base is not copied."""
    with unwarned():
        model = get_peft_model(base, copy.deepcopy(config), adapter_name=name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        for parameter_name, parameter in model.named_parameters():
            if parts in parameter_name:
                torch.nn.init.normal_(parameter, std=0.15)
    return model


def save(model: Any, folder: Path, **options: Any) -> None:
    """PEFT's save_pretrained, of the embedding nothing but what it must."""
    with unwarned():
        model.save_pretrained(folder, **{"save_embedding_layers": False, **options})


def of_lora(tensors: Any) -> Tensors:
    """The LoRA tensors of a dump."""
    return {
        name: tensor.detach().contiguous().clone()
        for name, tensor in dict(tensors).items()
        if "lora_" in name
    }


# What is served. Each maker takes the base and a folder, writes the folder and returns the true logits.

Maker = Callable[[Any, Path], torch.Tensor]


def saved(config: PeftConfig | None = None, *, parts: str = "lora_", **fields: Any) -> Maker:
    """As PEFT saves it, with random weights in these parts; LoRA with these fields unless another config is given."""

    def make(base: Any, folder: Path) -> torch.Tensor:
        model = trained(base, config or lora(**fields), parts=parts)
        save(model, folder)
        return logits(model)

    return make


def edited(
    change: Callable[[Tensors], Tensors], config: PeftConfig | None = None, **fields: Any
) -> Maker:
    """As PEFT saves it, with changed tensors and fields."""

    def make(base: Any, folder: Path) -> torch.Tensor:
        truth = saved(config)(base, folder)
        saved_config = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps({**saved_config, **fields}))
        save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS)
        return truth

    return make


def with_fields(**fields: Any) -> Maker:
    """A plain adapter with fields of a config that cannot be made here."""
    return edited(dict, **fields)


def renamed(old: str, new: str) -> Maker:
    """A plain adapter with one part of its names replaced."""
    return edited(
        lambda tensors: {name.replace(old, new): tensor for name, tensor in tensors.items()}
    )


def with_tensor(name: str, *shape: int) -> Maker:
    """A plain adapter with one more tensor."""
    return edited(lambda tensors: {**tensors, name: torch.ones(shape)})


def dumped(change: Callable[[Any], Any], name: str = "default") -> Maker:
    """The LoRA tensors of what `change` makes of PEFT's model, under the names that they have there."""

    def make(base: Any, folder: Path) -> torch.Tensor:
        model = trained(base, lora(), name)
        truth = logits(model)
        save(model, folder)
        with process_group(folder):
            save_file(of_lora(change(model)), folder / WEIGHTS)
        if name != "default":
            (folder / name / CONFIG).rename(folder / CONFIG)
        return truth

    return make


@contextmanager
def unwarned() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def process_group(folder: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{folder / 'group'}", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def compiled(model: Any) -> Any:
    """What torch.compile makes of a module, which is not run."""
    with unwarned():
        return torch.compile(model)


def _compile_layers(model: Any) -> None:
    layers = model.get_decoder().layers
    for index, layer in enumerate(layers):
        layers[index] = compiled(layer)


def _compiled_twice(model: Any) -> Any:
    _compile_layers(model)
    return compiled(model).state_dict()


def _fsdp(model: Any) -> Any:
    with unwarned():
        sharded = FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({LlamaDecoderLayer}),
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
        apply_activation_checkpointing(
            sharded, check_fn=lambda module: isinstance(module, LlamaDecoderLayer)
        )
    return sharded.named_parameters()


def _compiled_first(base: Any, folder: Path) -> torch.Tensor:
    model = trained(compiled(base), lora(target_modules=list(ALL_LINEAR)))
    save(model, folder)
    return logits(model.base_model.model._orig_mod)


def _compiled_layers_first(base: Any, folder: Path) -> torch.Tensor:
    plain = list(base.model.layers)
    _compile_layers(base)
    model = trained(base, lora(alpha_pattern={"v_proj": 3}))
    save(model, folder)
    for index, layer in enumerate(plain):
        base.model.layers[index] = layer
    return logits(model)


def _eva(base: Any, folder: Path) -> torch.Tensor:
    rows: Any = [
        {"input_ids": row}
        for row in torch.randint(0, 320, (16, 16), generator=torch.Generator().manual_seed(1))
    ]
    config = lora(
        r=4,
        init_lora_weights="eva",
        eva_config=EvaConfig(rho=2.0),
        target_modules=["q_proj", "down_proj"],
    )
    model = get_peft_model(base, config, low_cpu_mem_usage=True)
    initialize_lora_eva_weights(
        model, torch.utils.data.DataLoader(rows, batch_size=4), show_progress_bar=False
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.15)
    save(model, folder)
    return logits(model)


def _mlx(base: Any, folder: Path) -> torch.Tensor:
    truth = saved(r=6, lora_alpha=15, target_modules=list(ALL_LINEAR), layers_to_transform=[1, 2])(
        base, folder
    )
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    transposed = {
        name.removeprefix("base_model.model.")
        .removesuffix(".weight")
        .replace("lora_A", "lora_a")
        .replace("lora_B", "lora_b"): tensor.t().contiguous()
        for name, tensor in tensors.items()
    }
    save_file(transposed, folder / MLX_WEIGHTS)
    (folder / CONFIG).write_text(json.dumps(MLX_CONFIG))
    return truth


def _multimodal(base: Any, folder: Path) -> torch.Tensor:
    """LoRA on the language model of a Llava that has the base's weights."""
    vision = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
    )
    llava: Any = LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=base.config)
    )
    llava.model.language_model.load_state_dict(base.model.state_dict())
    llava.lm_head.load_state_dict(base.lm_head.state_dict())
    config = lora(
        target_modules=r".*language_model.*\.(q_proj|down_proj)",
        rank_pattern={"language_model.layers.1.self_attn.q_proj": 3},
        alpha_pattern={
            "model.language_model.layers.0.mlp.down_proj": 20,
            "model.layers.2.self_attn.q_proj": 40,
        },
    )
    return saved(config)(llava, folder)


@dataclass(frozen=True, kw_only=True)
class Served:
    """An export that is served exactly."""

    make: Maker
    layout: str = "peft"
    is_renamed: bool = False
    warnings: tuple[str, ...] = ()
    """Words of each warning in its report."""


_PATTERNS = {"layers.1.self_attn.q_proj": 24, "up_proj": 3}
SERVED = {
    "plain": Served(make=saved()),
    "rank 1": Served(make=saved(r=1, lora_alpha=2)),
    "no task type": Served(make=saved(task_type=None)),
    "some layers": Served(make=saved(layers_to_transform=[0, 2])),
    "bias=all on a base without biases": Served(make=saved(bias="all")),
    "bias=lora_only on a base without biases": Served(make=saved(bias="lora_only")),
    "all linear layers": Served(make=saved(target_modules="all-linear")),
    "excluded modules": Served(
        make=saved(target_modules="all-linear", exclude_modules=["down_proj"])
    ),
    "a pattern as target": Served(make=saved(target_modules=r".*\.(q|up)_proj")),
    "rank and alpha patterns": Served(
        make=saved(
            target_modules=list(ALL_LINEAR),
            rank_pattern=_PATTERNS,
            alpha_pattern={"model.layers.2.mlp.down_proj": 1, "self_attn.v_proj": 2, "v_proj": 40},
        ),
        warnings=("'self_attn.v_proj' and 'v_proj'",),
    ),
    "patterns of nothing": Served(
        make=saved(alpha_pattern={"k_proj": 3, "v_proj": 9}), warnings=("'k_proj'",)
    ),
    # PEFT sorts the keys when it saves: those that match the same module are sorted here, or training had others.
    "patterns as PEFT's documentation has them": Served(
        make=saved(
            target_modules=list(ALL_LINEAR),
            rank_pattern={
                "(q|k)_proj": 5,
                r".*\.layers\.[1-2]\..*": 9,
                "^model.layers.0.self_attn.v_proj": 2,
            },
            alpha_pattern={
                "(q|k)_proj": 40,
                r".*\.layers\.[1-2]\..*": 7,
                "^model.layers.0.mlp.*": 3,
                "v_proj": 2,
            },
        )
    ),
    "regexes of which the first counts, also before a name": Served(
        make=saved(
            target_modules=list(ALL_LINEAR),
            rank_pattern={
                r"\d+\.self_attn\.[a-q]_proj": 4,
                "k_proj": 12,
                "mlp.(?:up|gate)_proj$": 6,
                "self_attn": 50,
            },
            alpha_pattern={"(?i:K_PROJ)": 1, "[k-v]_proj": 21, "layers.1.self_attn.k_proj": 9},
        ),
        warnings=("'self_attn'",),
    ),
    "a rank above the limit that no module has": Served(
        make=saved(r=200, lora_alpha=40, rank_pattern={"(q|k|v)_proj": 8}, use_rslora=True)
    ),
    "a rank of nothing": Served(
        make=edited(dict, rank_pattern={"lm_head": 0, "k_proj": 5000}),
        warnings=("'k_proj', 'lm_head'",),
    ),
    "no rank": Served(make=edited(dict, r=None)),
    "rsLoRA": Served(make=saved(use_rslora=True, lora_alpha=4, rank_pattern={"v_proj": 32})),
    "gaussian start": Served(make=saved(init_lora_weights="gaussian")),
    "EVA": Served(make=_eva),
    "a dump": Served(make=dumped(lambda model: model.state_dict()), is_renamed=True),
    "a dump of another name": Served(
        make=dumped(lambda model: model.state_dict(), name="pirate"), is_renamed=True
    ),
    "compiled, then PEFT": Served(make=_compiled_first, is_renamed=True),
    "layers compiled, then PEFT": Served(make=_compiled_layers_first, is_renamed=True),
    "PEFT, then compiled twice": Served(make=dumped(_compiled_twice), is_renamed=True),
    "FSDP and checkpointing": Served(make=dumped(_fsdp), is_renamed=True),
    "DDP": Served(
        make=dumped(lambda model: DistributedDataParallel(model).state_dict()), is_renamed=True
    ),
    "a multimodal model": Served(
        make=_multimodal,
        is_renamed=True,
        warnings=("model.language_model.layers", "'model.layers.2.self_attn.q_proj'"),
    ),
    "an older multimodal model": Served(
        make=renamed(ROOT, "base_model.model.language_model.model.layers."),
        is_renamed=True,
        warnings=("language_model.model.layers",),
    ),
    "Unsloth's base": Served(
        make=with_fields(base_model_name_or_path="unsloth/Tiny-unsloth-bnb-4bit")
    ),
    "another base": Served(
        make=with_fields(base_model_name_or_path="meta/Big"), warnings=("'meta/Big'",)
    ),
    "MLX": Served(make=_mlx, layout="mlx"),
    "untrained": Served(make=saved(parts="none"), warnings=("before it was trained",)),
}


# What is refused. What the makers return does not matter.

Breaker = Callable[[Any, Path], object]


def _mlx_with(**fields: Any) -> Breaker:
    def make(base: Any, folder: Path) -> None:
        _mlx(base, folder)
        config = {
            name: value for name, value in {**MLX_CONFIG, **fields}.items() if value is not None
        }
        (folder / CONFIG).write_text(json.dumps(config))

    return make


def _two_adapters(base: Any, folder: Path) -> None:
    model = trained(base, lora())
    model.add_adapter("other", lora(r=4))
    save(model, folder)
    save_file(of_lora(model.state_dict()), folder / WEIGHTS)


def _twice(tensors: Tensors) -> Tensors:
    name, tensor = next(iter(tensors.items()))
    return {**tensors, name.replace(".weight", ".default.weight"): tensor.clone()}


def _new_vocabulary(base: Any, folder: Path) -> None:
    base.resize_token_embeddings(330)
    save(trained(base, lora()), folder, save_embedding_layers=True)


def _wrapped_patterns(base: Any, folder: Path) -> None:
    _compile_layers(base)
    save(trained(base, lora(alpha_pattern={"layers.1.self_attn.q_proj": 3})), folder)


class Refused:
    """An export that is refused by name; the words are of what is not served, and of the hint."""

    def __init__(self, code: str, make: Breaker, *words: str) -> None:
        self.make, self.code, self.words = make, code, words


_FEATURE, _TYPE, _TENSOR = (
    "config.feature_unsupported",
    "config.peft_type_unsupported",
    "weights.tensor_not_allowed",
)
_RECIPE = "path_initial_model_for_weight_conversion"
_DROP_BOTH = "drop embed_tokens and lm_head from target_modules, and retrain."
_ZERO = ("ZeRO-3", "stage3_gather_16bit_weights_on_model_save")
_SPLIT_QKV, _SPLIT_GATE = ("fused", "q_proj, k_proj and v_proj"), ("fused", "gate_proj and up_proj")


REFUSED = {
    "a rank above the limit": Refused("config.rank_invalid", saved(r=65), "65", "up to 64"),
    "another task": Refused(
        "config.task_type_unsupported",
        saved(task_type="FEATURE_EXTRACTION"),
        "task_type",
        "CAUSAL_LM",
    ),
    "a look ahead in rank_pattern": Refused(
        "config.pattern_unsupported",
        saved(rank_pattern={"(?!v)[qv]_proj": 4}),
        "rank_pattern",
        "looks ahead",
    ),
    "a rank that is not the file's": Refused(
        "weights.rank_mismatch",
        edited(dict, r=200),
        "so rank 8; expected rank 200",
        "lora_alpha / r",
    ),
    "patterns of a wrapped model": Refused(
        "config.pattern_unsupported", _wrapped_patterns, "wrapped model", "module name alone"
    ),
    "DoRA": Refused(_FEATURE, saved(use_dora=True), "DoRA", "use_dora=false"),
    "DoRA without its config": Refused(
        _TENSOR,
        edited(dict, lora(use_dora=True), use_dora=False),
        "lora_magnitude_vector",
        "use_dora=false",
    ),
    "modules_to_save": Refused(
        _FEATURE, saved(modules_to_save=["lm_head"]), "modules_to_save", "null"
    ),
    "a head without its config": Refused(
        _TENSOR,
        with_tensor("base_model.model.lm_head.weight", 320, 64),
        "lm_head",
        "modules_to_save",
    ),
    "LoRA on the embedding": Refused(
        _TENSOR, saved(target_modules=["embed_tokens", "q_proj"]), _DROP_BOTH
    ),
    "LoRA on the head": Refused(_TENSOR, saved(target_modules=["lm_head", "q_proj"]), _DROP_BOTH),
    "more tokens": Refused(
        _TENSOR, _new_vocabulary, "without resizing the vocabulary", "save_embedding_layers"
    ),
    "a copy of a base weight": Refused(
        _TENSOR,
        with_tensor(f"{ROOT}0.self_attn.q_proj.base_layer.weight", 64, 64),
        "copy of a base weight",
        "save_pretrained",
    ),
    "trained tokens": Refused(
        _FEATURE, saved(trainable_token_indices=[1, 2]), "trainable_token_indices", "Retrain"
    ),
    "trained biases": Refused(
        _TENSOR,
        with_tensor(f"{ROOT}0.self_attn.q_proj.base_layer.bias", 64),
        "trained bias",
        'bias="none"',
    ),
    "lora_bias": Refused(_FEATURE, saved(lora_bias=True), "lora_bias", "lora_bias=false"),
    "PiSSA": Refused(_FEATURE, saved(init_lora_weights="pissa"), "pissa", _RECIPE),
    "fast PiSSA": Refused(
        _FEATURE, saved(init_lora_weights="pissa_niter_2"), "pissa_niter_2", _RECIPE
    ),
    "OLoRA": Refused(_FEATURE, saved(init_lora_weights="olora"), "olora", _RECIPE),
    "CorDA": Refused(
        _FEATURE,
        with_fields(init_lora_weights="corda", corda_config={"corda_method": "ipm"}),
        "corda",
        _RECIPE,
    ),
    "LoRA-GA": Refused(_FEATURE, with_fields(init_lora_weights="lora_ga"), "lora_ga", _RECIPE),
    "LoftQ": Refused(_FEATURE, with_fields(init_lora_weights="loftq"), "loftq", "Retrain"),
    "KaSA": Refused(_FEATURE, saved(kasa_config=KasaConfig()), "KaSA", "Retrain"),
    "layer_replication": Refused(
        _FEATURE, saved(layer_replication=[[0, 2], [1, 3]]), "layer_replication", "merge"
    ),
    "target_parameters": Refused(
        _FEATURE,
        with_fields(target_parameters=["mlp.experts.down_proj"]),
        "target_parameters",
        "target_modules",
    ),
    "experts without their config": Refused(
        _TENSOR,
        with_tensor(f"{ROOT}0.mlp.experts.base_layer.lora_A.weight", 32, 64),
        "Mixture-of-experts",
    ),
    "aLoRA": Refused(_FEATURE, saved(alora_invocation_tokens=[1, 2]), "activated LoRA", "Retrain"),
    "BD-LoRA": Refused(
        _FEATURE,
        saved(
            target_modules=["q_proj"],
            use_bdlora=BdLoraConfig(target_modules_bd_a=["q_proj"], nblocks=2),
        ),
        "block-diagonal",
        "Retrain",
    ),
    "QALoRA": Refused(_FEATURE, saved(use_qalora=True), "QALoRA", "use_qalora=false"),
    "Arrow": Refused(_FEATURE, with_fields(arrow_config={"top_k": 3}), "Arrow", "one by one"),
    "VeRA": Refused(
        _TYPE,
        saved(VeraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])),
        "VERA",
        "Retrain as LoRA",
    ),
    "prefix tuning": Refused(
        _TYPE,
        saved(PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)),
        "PREFIX_TUNING",
        "Retrain as LoRA",
    ),
    "Conv1D": Refused(_FEATURE, with_fields(fan_in_fan_out=True), "fan_in_fan_out", "false"),
    "empty tensors": Refused(
        "weights.shape_invalid",
        edited(lambda tensors: {name: torch.empty(0) for name in tensors}),
        *_ZERO,
    ),
    "no tensors": Refused("weights.empty", edited(lambda _: {}), *_ZERO),
    "plain and multimodal names": Refused(
        _TENSOR,
        renamed(f"{ROOT}1", "base_model.model.model.language_model.layers.1"),
        "two models",
        "by itself",
    ),
    "a vision tower": Refused(
        _TENSOR,
        renamed("model.layers.2", "model.vision_tower.encoder.layers.2"),
        "vision_tower",
        "language model's layers alone",
    ),
    "two adapters": Refused(
        _TENSOR, _two_adapters, "two adapters", "default", "other", "by itself"
    ),
    "one matrix twice": Refused(
        "weights.duplicate_tensor", edited(_twice), "two spellings", "Keep one"
    ),
    "MLX with DoRA": Refused(
        _FEATURE, _mlx_with(fine_tune_type="dora"), "'dora'", "--fine-tune-type lora"
    ),
    "all of it with MLX": Refused(_FEATURE, _mlx_with(fine_tune_type="full"), "'full'", "lora"),
    "MLX of another scale": Refused(
        "config.field_unsupported",
        _mlx_with(fine_tune_type=None, lora_parameters={"rank": 6, "scale": 10.0, "alpha": 16}),
        "alpha and scale",
        "Remove alpha",
    ),
    "linear_qkv": Refused(
        _TENSOR, renamed("self_attn.q_proj", "self_attention.linear_qkv"), "NeMo", *_SPLIT_QKV
    ),
    "linear_fc1": Refused(
        _TENSOR, renamed("self_attn.q_proj", "mlp.linear_fc1"), "NeMo", *_SPLIT_GATE
    ),
    "qkv_proj of Phi-3": Refused(
        _TENSOR, renamed("self_attn.q_proj", "self_attn.qkv_proj"), "qkv_proj", *_SPLIT_QKV
    ),
    "gate_up_proj of Phi-3": Refused(
        _TENSOR, renamed("self_attn.q_proj", "mlp.gate_up_proj"), "gate_up_proj", *_SPLIT_GATE
    ),
    "a value head": Refused(
        _TENSOR, with_tensor("v_head.summary.weight", 1, 64), "v_head", "value head", "leave"
    ),
    "a pickle": Refused(
        "weights.not_safetensors",
        lambda base, folder: save(trained(base, lora()), folder, safe_serialization=False),
        "adapter_model.bin",
        "load(",
        "weights_only=True",
        "save_file",
    ),
}
