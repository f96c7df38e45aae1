"""TRL's two clients of a vLLM server: the trainers' own, and the one of asynchronous GRPO, which loads adapters."""

from __future__ import annotations

import os

from accelerate import PartialState
from feature import ADAPTER, BASE, QUESTION, TOOLS, URL, equal, feature, price_of
from trl.experimental.async_grpo.vllm_client import VLLMClient as SteeringClient
from trl.generation.vllm_client import VLLMClient

CHECKPOINT = os.environ["MANYLORA_ADAPTER_PATH"]
ANSWER_IDS = [int(token) for token in os.environ["MANYLORA_ANSWER_IDS"].split()]
PROMPT_IDS = [int(token) for token in os.environ["MANYLORA_PROMPT_IDS"].split()]
PartialState()
steering = SteeringClient(URL, server_timeout=10)

with feature("health, models, server info, world size"):
    steering.wait_for_server_ready()
    equal([steering.get_max_model_len(), steering.get_world_size()], [1024, 1])
    equal(steering.get_dtype(), steering.get_server_info()["model_config"]["dtype"])

with feature("pause, resume, reset of the prefix cache"):
    steering.pause()
    steering.resume()

client = VLLMClient(base_url=URL)
greedy = {"temperature": 0.0, "max_tokens": 64}

with feature("generate from token ids"):
    made = client.generate([PROMPT_IDS, PROMPT_IDS[:5]], n=2, max_tokens=8, logprobs=1)
    equal(made["prompt_ids"], [PROMPT_IDS, PROMPT_IDS[:5]])
    equal([len(made["completion_ids"]), len(made["logprobs"])], [4, 4])
    for ids, shown in zip(made["completion_ids"], made["logprob_token_ids"], strict=True):
        equal(
            [len(ids), all(token in near for token, near in zip(ids, shown, strict=True))],
            [len(shown), True],
        )

with feature("generate under a regex"):
    equal(
        len(client.generate([PROMPT_IDS], structured_outputs_regex="[0-9]{3}")["completion_ids"][0])
        > 0,
        True,
    )

with feature("chat"):
    talks = [[{"role": "user", "content": QUESTION}]] * 3
    equal(client.chat(talks, **greedy)["prompt_ids"], [PROMPT_IDS] * 3)

with feature("chat with tools"):
    equal(
        len(
            client.chat([[{"role": "user", "content": QUESTION}]], tools=[TOOLS[0], price_of])[
                "completion_ids"
            ]
        ),
        1,
    )

with feature("get_sequence_logprobs"):
    scored = client.get_sequence_logprobs(
        [[*PROMPT_IDS, *ANSWER_IDS]], [len(PROMPT_IDS)], top_logprobs=3
    )
    equal(scored["actual_token_ids"], [[[token] for token in ANSWER_IDS]])

with feature("load_lora_adapter, generate with it, unload_lora_adapter"):
    steering.load_lora_adapter("policy-1", CHECKPOINT)
    client.model = "policy-1"
    equal(client.generate([PROMPT_IDS], **greedy)["completion_ids"], [ANSWER_IDS])
    steering.unload_lora_adapter("policy-1")
    steering.unload_lora_adapter("policy-1")
    try:
        client.generate([PROMPT_IDS], **greedy)
        raise AssertionError(f"policy-1 still answers beside {BASE} and {ADAPTER}")
    except Exception as error:
        equal("404" in str(error), True)

with feature("reset_prefix_cache"):
    client.reset_prefix_cache()
