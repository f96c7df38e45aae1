"""instructor, in every mode that it has for OpenAI's API."""

from __future__ import annotations

from typing import Any

import instructor
import openai
from feature import BASE, CARD_QUESTION, KEY, V1, Pick, feature
from instructor import Mode

MODES = (
    Mode.TOOLS,
    Mode.TOOLS_STRICT,
    Mode.JSON,
    Mode.JSON_SCHEMA,
    Mode.MD_JSON,
    Mode.RESPONSES_TOOLS,
)
asked: Any = {"model": BASE, "temperature": 0, "response_model": Pick, "max_retries": 0}
asked["messages"] = [{"role": "user", "content": CARD_QUESTION}]

for mode in MODES:
    with feature(mode.name):
        client = instructor.from_openai(
            openai.OpenAI(base_url=V1, api_key=KEY, max_retries=0), mode=mode
        )
        Pick.model_validate(client.chat.completions.create(**asked).model_dump())

with feature("create_partial"):
    client = instructor.from_openai(
        openai.OpenAI(base_url=V1, api_key=KEY, max_retries=0), mode=Mode.TOOLS
    )
    *_, last = client.chat.completions.create_partial(**asked)
    Pick.model_validate(last.model_dump())
