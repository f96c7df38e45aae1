"""Fields of OpenAI's and vLLM's bodies that Manylora does not offer, with the values that change nothing.

Clients send many of them on every call. A field passes with null or a value listed here. With any other value it is
refused by its name.
"""

from __future__ import annotations

from collections.abc import Mapping

Neutral = Mapping[str, tuple[object, ...]]

IGNORED = frozenset(
    {
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "client_metadata",
        "max_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
        "cache_control",
        "context_management",
        "inference_geo",
        "speed",
        "diagnostics",
        "user_profile_id",
        "workspace_id",
        "billing_policy",
        "access_programs",
        "fallback_credit_token",
    }
)
"""Accepted with any value, by every API: accounts, caches and speeds of others, which change no answer here."""

HINTS = {
    f"guided_{name}": f"Manylora does not support guided_{name}. Send structured_outputs with json, regex or the like."
    for name in (
        "json",
        "regex",
        "choice",
        "grammar",
        "json_object",
        "decoding_backend",
        "whitespace_pattern",
    )
}
"""Advice for those who send some of them."""

# These pass with null alone.
_ENGINE = ("cache_salt", "kv_transfer_params", "vllm_xargs", "lora_path")
_OPENAI = ("audio", "image", "moderation", "web_search_options", "background_options")
_ANTHROPIC = ("container", "compaction", "thread")

TOKENIZE: Neutral = {"chat_template": (), "mm_processor_kwargs": ()}
SHARED: Neutral = {
    **dict.fromkeys((*HINTS, *_ENGINE, *_OPENAI, *_ANTHROPIC), ()),
    "spaces_between_special_tokens": (True,),
    "logits_processors": ([],),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "mcp_servers": ([],),
    "fallbacks": ([],),
    "truncation": ("disabled",),
    "background": (False,),
}
"""Fields that every API takes and ignores."""
COMPLETIONS: Neutral = {**SHARED, "suffix": ("",), "prompt_embeds": ()}
CHAT: Neutral = {**SHARED, **TOKENIZE, "documents": ()}
MESSAGE: Neutral = {"function_call": (), "audio": (), "images": ([],), "prefix": (False,)}
"""Fields that change a message in a way that is not served; other fields that clients keep with one are ignored."""
MESSAGE_HINTS = {
    "prefix": "Manylora does not support prefix. Send continue_final_message: true with the request."
}
