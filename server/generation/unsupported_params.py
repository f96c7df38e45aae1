"""Fields of OpenAI's and vLLM's bodies that Manylora does not offer, with the values that change nothing.

Clients send many of them on every call. A field passes with null or a value listed here. With any other value it is
refused by its name.
"""

from __future__ import annotations

from collections.abc import Mapping

Neutral = Mapping[str, tuple[object, ...]]

IGNORED = frozenset({"metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier"})
"""Accepted with any value."""
IGNORED_IN_MESSAGES = frozenset({"id", "metadata", "annotations", "cache_control", "provider_specific_fields"})
"""What clients keep with a message or one of its text parts for themselves; accepted with any value."""

HINTS = {
    f"guided_{name}": f"Manylora does not support guided_{name}. Send structured_outputs with json, regex or the like."
    for name in ("json", "regex", "choice", "grammar", "json_object", "decoding_backend", "whitespace_pattern")
}
"""What to do instead of sending some of them."""

# These pass with null alone.
_ENGINE = ("cache_salt", "kv_transfer_params", "vllm_xargs", "lora_path")
_OPENAI = ("audio", "prediction", "verbosity", "web_search_options")

TOKENIZE: Neutral = {"chat_template": (), "mm_processor_kwargs": ()}
SHARED: Neutral = {
    **dict.fromkeys((*HINTS, *_ENGINE), ()),
    "spaces_between_special_tokens": (True,),
    "logits_processors": ([],),
}
COMPLETIONS: Neutral = {**SHARED, "suffix": ("",), "prompt_embeds": ()}
CHAT: Neutral = {
    **SHARED,
    **TOKENIZE,
    **dict.fromkeys(_OPENAI, ()),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "documents": (),
}
MESSAGE: Neutral = {"function_call": (), "refusal": ("",), "audio": ()}
