"""Reads the `adapter_config.json` that mlx-lm writes beside `adapters.safetensors`: all settings of a training run.

Only `lora_parameters` changes the result. Its `scale` is the factor of B @ A. Knows nothing of tensors.
"""

from __future__ import annotations

from collections.abc import Mapping

from manylora.adapters.checkpoint.findings import refuse, refuse_unsupported
from manylora.adapters.checkpoint.peft_fields import Rule, check_field, field_names
from manylora.strict_json import shown

_AS_WRITTEN = "Upload the adapter_config.json that mlx-lm wrote."
_FIELDS: dict[str, tuple[Rule, ...]] = dict.fromkeys(
    field_names("""
    model train test data hf_dataset fine_tune_type optimizer optimizer_config learning_rate lr_schedule seed
    num_layers lora_layers batch_size iters val_batches test_batches steps_per_report steps_per_eval save_every
    max_seq_length resume_adapter_file adapter_path config grad_checkpoint grad_accumulation_steps
    clear_cache_threshold mask_prompt prompt_feature completion_feature text_feature chat_feature wandb report_to
    project_name lora_parameters rank scale alpha dropout keys
"""),
    (),
)
"""Fields that `as_peft` reads, and settings of the run without effect on the adapter. The tensors tell which layers and
modules were trained."""


def is_mlx(config: Mapping[str, object]) -> bool:
    """True if the config is one of mlx-lm, not of PEFT."""
    return "peft_type" not in config and not config.keys().isdisjoint(
        {"fine_tune_type", "lora_parameters"}
    )


def as_peft(config: Mapping[str, object]) -> dict[str, object]:
    """Translate the config to fields of PEFT, with `lora_alpha` for the factor. The fields are not checked yet.

    Raises:
        AdapterFormatError: Not what mlx-lm writes; codes `config.*`.
        AdapterIncompatibleError: Not LoRA, or fields are missing; codes `config.*`.
    """
    kind = "dora" if config.get("use_dora") else config.get("fine_tune_type", "lora")
    if kind != "lora":
        message = f"fine_tune_type is {shown(kind)}; only LoRA is served."
        hint = "Train again with `mlx_lm.lora --fine-tune-type lora`."
        refuse_unsupported("config.feature_unsupported", message, "fine_tune_type", hint)
    parameters = config.get("lora_parameters")
    if (
        not isinstance(parameters, dict)
        or parameters.get("rank") is None
        or parameters.get("scale") is None
    ):
        message = "lora_parameters must give rank and scale."
        refuse("config.field_missing", message, "lora_parameters", _AS_WRITTEN)
    rank = parameters["rank"]
    scale = parameters["scale"]
    alpha = parameters.get("alpha")
    if "fine_tune_type" not in config and alpha not in (None, rank):
        # Before mlx-lm wrote fine_tune_type, its factor was scale * alpha / rank in some versions and scale in others.
        message = (
            "lora_parameters gives alpha and scale, from which early versions of mlx-lm computed another factor than "
            "later ones."
        )
        hint = "Remove alpha, and set scale to the factor of the training."
        refuse_unsupported("config.field_unsupported", message, "lora_parameters", hint)
    if type(rank) not in (int, float) or type(scale) not in (int, float):
        message = f"rank and scale of lora_parameters must be numbers, got {shown(rank)} and {shown(scale)}."
        refuse("config.value_invalid", message, "lora_parameters", _AS_WRITTEN)
    for name, value in [*parameters.items(), *config.items()]:
        check_field(name, value, _FIELDS)
    return {"peft_type": "LORA", "r": rank, "lora_alpha": scale}
