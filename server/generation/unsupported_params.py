"""Fields that OpenAI or vLLM know and Weft lacks, with the values that change nothing.

Clients send many of them on every call. A field passes with null or a value listed here, and is refused by name with
any other.
"""

from __future__ import annotations

from collections.abc import Mapping

Neutral = Mapping[str, tuple[object, ...]]

IGNORED = frozenset({"metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier"})
"""Accepted with any value."""
IGNORED_IN_MESSAGES = frozenset({"id", "metadata", "annotations", "cache_control", "provider_specific_fields"})
"""What clients keep with a message or one of its text parts for themselves; accepted with any value."""

SHARED: Neutral = {
    "min_tokens": (0,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "truncate_prompt_tokens": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "logits_processors": ([],),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "cache_salt": (),
    "kv_transfer_params": (),
    "vllm_xargs": (),
    "lora_path": (),
}
COMPLETIONS: Neutral = {
    **SHARED,
    "suffix": ("",),
    "add_special_tokens": (True,),
    "prompt_embeds": (),
}
CHAT: Neutral = {
    **SHARED,
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "echo": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (False,),
    "documents": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "mm_processor_kwargs": (),
    "include_reasoning": (True,),
}
MESSAGE: Neutral = {
    "tool_calls": ([],),
    "tool_call_id": (),
    "function_call": (),
    "refusal": ("",),
    "audio": (),
    "reasoning": ("",),
    "reasoning_content": ("",),
}
TOKENIZE: Neutral = {
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "mm_processor_kwargs": (),
    "tools": ([],),
}
