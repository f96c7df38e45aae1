"""inspect-ai as evaluations run it, over both of its providers that fit: openai-api/ and vllm/."""

from __future__ import annotations

import os
import tempfile
from typing import Any

from feature import (
    ADAPTER,
    AGENT_QUESTION,
    ANSWER,
    BASE,
    CARD_QUESTION,
    KEY,
    PLACE,
    PRICE,
    QUESTION,
    V1,
    Card,
    equal,
    feature,
    is_scarf,
)

os.environ |= {
    "MANYLORA_API_KEY": KEY,
    "MANYLORA_BASE_URL": V1,
    "VLLM_BASE_URL": V1,
    "VLLM_API_KEY": KEY,
}
os.environ |= {"INSPECT_LOG_DIR": tempfile.mkdtemp(), "INSPECT_DISPLAY": "none"}

from inspect_ai import Task, eval  # noqa: A004 - they read the environment
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, ResponseSchema
from inspect_ai.scorer import choice, includes
from inspect_ai.solver import generate, multiple_choice, use_tools
from inspect_ai.tool import Tool, tool
from inspect_ai.util import json_schema

greedy: Any = {"temperature": 0, "max_tokens": 200, "max_retries": 0}


@tool
def where_is() -> Tool:
    async def execute(item: str) -> str:
        """Tells where an item is.

        Args:
            item: The name of an item.
        """
        return PLACE

    return execute


@tool
def price_of() -> Tool:
    async def execute(item: str) -> str:
        """Tells the price of an item.

        Args:
            item: The name of an item.
        """
        return PRICE

    return execute


def run(task: Task, model: str, **fields: Any) -> Any:
    """The log of an evaluation that ended well."""
    log = eval(task, model=model, model_args=fields, **greedy)[0]
    if log.status != "success" or log.samples is None or log.samples[0].error:
        raise AssertionError(str(log.error or (log.samples and log.samples[0].error))[:600])
    return log


def score(log: Any) -> float:
    return float(log.results.scores[0].metrics["accuracy"].value)


for provider, fields in (
    ("openai-api/manylora", {}),
    ("openai-api/manylora", {"responses_api": True}),
    ("vllm", {}),
):
    name = f"{provider.split('/')[0]}/{' with responses_api' if fields else ''}"
    adapter = f"{BASE}:{ADAPTER}" if provider == "vllm" else ADAPTER

    with feature(f"{name}: eval"):
        samples = [Sample(input=QUESTION, target=ANSWER, id=number) for number in range(4)]
        task = Task(dataset=samples, solver=generate(), scorer=includes())
        equal(score(run(task, f"{provider}/{adapter}", **fields)), 1.0)

    with feature(f"{name}: tools"):
        steps = [use_tools(where_is(), price_of()), generate()]
        task = Task(
            dataset=[Sample(input=AGENT_QUESTION, target=PLACE)], solver=steps, scorer=includes()
        )
        equal(score(run(task, f"{provider}/{BASE}", **fields)), 1.0)

    with feature(f"{name}: ResponseSchema"):
        schema = ResponseSchema(name="card", json_schema=json_schema(Card), strict=True)
        config = GenerateConfig(response_schema=schema)
        task = Task(dataset=[Sample(input=CARD_QUESTION)], solver=generate(), config=config)
        equal(
            is_scarf(run(task, f"{provider}/{BASE}", **fields).samples[0].output.completion), True
        )

with feature("multiple_choice"):
    sample = Sample(input=QUESTION, choices=["yes", "no"], target="A")
    run(
        Task(dataset=[sample], solver=multiple_choice(), scorer=choice()),
        f"openai-api/manylora/{ADAPTER}",
    )

with feature("logprobs and num_choices"):
    config = GenerateConfig(logprobs=True, top_logprobs=2, num_choices=2, seed=1)
    log = run(
        Task(dataset=[Sample(input=QUESTION)], solver=generate(), config=config), f"vllm/{ADAPTER}"
    )
    equal(len(log.samples[0].output.choices), 2)
    equal(log.samples[0].output.choices[0].logprobs is not None, True)
