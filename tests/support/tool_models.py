"""The demo's tokenizer with a chat template that shows tools, reasoning and calls as other families do."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from api_server import Api
from fake_engine import DEMO_MODEL
from weft.engine.text.tokenizer import Tokenizer

HERMES = (
    "{{ bos_token }}{% if tools %}<|system|>{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}Answer as "
    '<tool_call>{"name": ..., "arguments": ...}</tool_call><|end|>{% endif %}'
    "{% for message in messages %}<|{{ 'user' if message.role == 'tool' else message.role }}|>"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{% if message.role == 'tool' %}{{ message.tool_call_id }}={% endif %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>"
    "{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% if enable_thinking %}<think>\n"
    "{% endif %}{% endif %}"
)


@cache
def tokenizer_with(chat_template: str = HERMES, **fields: Any) -> Tokenizer:
    """The demo's tokenizer with another chat template; `fields` are more of its tokenizer_config.json."""
    folder = Path(mkdtemp(prefix="weft-tokenizer-"))
    for name in ("tokenizer.json", "config.json"):
        (folder / name).symlink_to(DEMO_MODEL / name)
    config = json.loads((DEMO_MODEL / "tokenizer_config.json").read_text())
    config.pop("response_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": chat_template, **fields}))
    return Tokenizer(folder)


def use_tokenizer(api: Api, tokenizer: Tokenizer) -> None:
    """Serve the demo model with this tokenizer."""
    ready = replace(api.services.ready, max_model_len=4096)
    api.services = api.app.state.services = replace(api.services, tokenizer=tokenizer, ready=ready)
