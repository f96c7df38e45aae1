"""DSPy: its LM in every type, a signature under a JSON schema, and tools."""

from __future__ import annotations

from typing import Any, Literal

import dspy
import litellm
from feature import (
    ADAPTER,
    AGENT_QUESTION,
    ANSWER,
    BASE,
    CARD_QUESTION,
    KEY,
    QUESTION,
    TOOLS,
    V1,
    equal,
    feature,
)

litellm.suppress_debug_info = True
server: Any = {
    "api_base": V1,
    "api_key": KEY,
    "temperature": 0,
    "cache": False,
    "num_retries": 0,
    "max_tokens": 200,
}

with feature("LM"):
    equal(dspy.LM(f"openai/{ADAPTER}", **server)(QUESTION), [ANSWER])

with feature("LM of type text"):
    equal(len(dspy.LM(f"openai/{BASE}", model_type="text", **server)("The shop")), 1)

with feature("LM of type responses"):
    equal(
        dspy.LM(f"openai/{ADAPTER}", model_type="responses", **server)(QUESTION)[0]["text"], ANSWER
    )

with feature("n and logprobs"):
    warm = {**server, "temperature": 1.0}
    equal(len(dspy.LM(f"openai/{ADAPTER}", n=2, logprobs=True, **warm)(QUESTION)), 2)

with feature("LM with tools"):
    called = dspy.LM(f"openai/{BASE}", **server)(
        AGENT_QUESTION, tools=TOOLS, tool_choice="required"
    )
    equal(called[0]["tool_calls"][0].function.name in ("where_is", "price_of"), True)


class Describe(dspy.Signature):
    """Describe an item of the shop."""

    question: str = dspy.InputField()
    item: Literal["scarf", "cloak"] = dspy.OutputField()
    in_stock: bool = dspy.OutputField()


for prefix in ("openai", "hosted_vllm"):
    with feature(f"Predict with JSONAdapter, {prefix}/"):
        # DSPy sends a schema only to models of which LiteLLM knows that they take one.
        litellm.register_model(
            {f"{prefix}/{BASE}": {"supports_response_schema": True, "litellm_provider": prefix}}
        )
        with dspy.context(
            lm=dspy.LM(f"{prefix}/{BASE}", engine="litellm", **server), adapter=dspy.JSONAdapter()
        ):
            told = dspy.Predict(Describe)(question=CARD_QUESTION)
        equal([told.item in ("scarf", "cloak"), type(told.in_stock)], [True, bool])
