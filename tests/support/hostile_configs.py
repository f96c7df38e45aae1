"""Hostile values for each key of a checkpoint's configs; as a program it reads them under limits and tells what came.

`python hostile_configs.py FOLDER` reads each case in turn, and writes the results into the folder.
"""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from manylora import demo
from manylora.errors import ConfigError

Case = tuple[str, tuple[str, ...], Any]
"""File, place in it, and the value there."""
HUGE = 10**400
VALUES: tuple[Any, ...] = (
    *(
        0,
        -1,
        1,
        3,
        10**9,
        2**31,
        2**63,
        10**19,
        HUGE,
        -HUGE,
        1e308,
        1e-320,
        -1.5,
        2.0,
        math.nan,
        math.inf,
    ),
    *(
        "",
        "x" * 100_000,
        "8",
        "\n\x1b[31m",
        [],
        [0],
        [None] * 10_000,
        [[-1] * 3],
        {},
        {"a": {"b": [1]}},
        None,
        True,
        False,
    ),
)
DEEP: Any = []
for _ in range(400):
    DEEP = [DEEP]
SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *(
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "rms_norm_eps",
        "hidden_act",
        "architectures",
    ),
    *(
        "model_type",
        "tie_word_embeddings",
        "attention_bias",
        "mlp_bias",
        "dtype",
        "torch_dtype",
        "sliding_window",
    ),
    *(
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "quantization_config",
        "eos_token_id",
        "layer_types",
    ),
    *(
        "original_max_position_embeddings",
        "partial_rotary_factor",
        "max_window_layers",
        "auto_map",
        "unknown",
    ),
)
BY_ARCHITECTURE = ("sliding_window", "layer_types", "max_window_layers")
ROPE = (
    "rope_type",
    "type",
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "partial_rotary_factor",
)
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": True,
        "attention_factor": 1.0,
    }
    | {"mscale": 1.0, "mscale_all_dim": 1.0},
}
QUANTISED: tuple[dict[str, Any], ...] = (
    {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "checkpoint_format": "gptq",
        "dynamic": {},
    },
    {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True},
    {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"},
    {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
    },
    {"quant_method": "gguf", "bits": 4},
    {"quant_method": "manylora", "format": "q3.5"},
    {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}},
)
WEIGHTS = {
    "num_bits": 4,
    "type": "int",
    "group_size": 128,
    "strategy": "group",
    "block_structure": [1, 1],
}
RESULTS = "results.json"
FILES = ("config.json", "generation_config.json", "tokenizer_config.json")
TOKENIZER = (
    "eos_token",
    "bos_token",
    "chat_template",
    "model_max_length",
    "tokenizer_class",
    "added_tokens_decoder",
)


def cases() -> Iterator[tuple[Case, dict[str, Any]]]:
    """Each case, with what else the config says."""
    values = (*VALUES, DEEP)
    for value in values:
        for key in SIZES:
            for architecture in ("Llama", "Qwen2")[: 2 if key in BY_ARCHITECTURE else 1]:
                named = {
                    "architectures": [f"{architecture}ForCausalLM"],
                    "model_type": architecture.lower(),
                }
                yield ("config.json", (key,), value), named
        for kind, fields in KINDS.items():
            for key in {*ROPE, *fields}:
                yield (
                    ("config.json", ("rope_parameters", key), value),
                    {"rope_parameters": {"rope_type": kind, **fields}},
                )
        for config in QUANTISED:
            for key in config:
                yield (
                    ("config.json", ("quantization_config", key), value),
                    {"quantization_config": config},
                )
        for key in WEIGHTS:
            groups = {**QUANTISED[-1], "config_groups": {"group_0": {"weights": WEIGHTS}}}
            place = ("quantization_config", "config_groups", "group_0", "weights", key)
            yield ("config.json", place, value), {"quantization_config": groups}
        yield ("generation_config.json", ("eos_token_id",), value), {}
        for key in TOKENIZER:
            yield ("tokenizer_config.json", (key,), value), {}


def with_value(content: dict[str, Any], place: tuple[str, ...], value: object) -> dict[str, Any]:
    """The content with another value at a place."""
    first, *rest = place
    return {**content, first: with_value(content[first], tuple(rest), value) if rest else value}


def read(folder: Path, *, reads_tokenizer: bool = False) -> str | None:
    """What the start reads before it computes; returns the error that an operator sees."""
    import torch

    from manylora.config import Config, MemoryConfig, ModelConfig, ServerConfig
    from manylora.engine.execution.memory_plan import check_start
    from manylora.engine.model.checkpoint.weights import check_checkpoint
    from manylora.engine.model.rope import rope_table
    from manylora.engine.model.spec import read_spec
    from manylora.engine.text.tokenizer import Tokenizer, read_eos_token_ids

    config = Config(
        model=ModelConfig(path=str(folder), device="cpu"),
        memory=MemoryConfig(gib=0.1),
        server=ServerConfig(),
    )
    try:
        read_eos_token_ids(folder)
        if reads_tokenizer:
            Tokenizer(folder).chat_template  # noqa: B018
            return None
        check_start(config)
        spec = read_spec(folder)
        check_checkpoint(folder, spec)
        rope_table(spec.rope, spec.head_dim, 16, torch.device("cpu"))
    except ConfigError as error:
        return str(error)
    return None


def main(folder: Path) -> None:
    for reads_tokenizer in (False, True):  # imports
        read(demo.MODEL, reads_tokenizer=reads_tokenizer)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (512 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for name in ("model.safetensors", "tokenizer.json"):
        (folder / name).symlink_to(demo.MODEL / name)
    usual = {name: json.loads((demo.MODEL / name).read_text()) for name in FILES}
    results: list[list[Any]] = []
    for (name, place, value), more in cases():
        for each, content in usual.items():
            content = {**content, **more} if each == "config.json" else content
            (folder / each).write_text(
                json.dumps(with_value(content, place, value) if each == name else content)
            )
        began = time.process_time()
        try:
            problem = read(folder, reads_tokenizer=name == "tokenizer_config.json")
        except BaseException as error:  # noqa: BLE001 - what a test is to see
            problem = f"RAISED {type(error).__name__}: {error}"[:300]
        took = time.process_time() - began
        results.append([[name, *place], repr(value)[:60], problem, took])
    (folder / RESULTS).write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
