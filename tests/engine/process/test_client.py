from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from contextlib import aclosing
from dataclasses import replace

import pytest

from engine_client import (
    ADAPTERS,
    Engine,
    collect,
    endless,
    eventually,
    is_idle,
    is_on_device,
    question,
    tokens_of,
)
from manylora.adapters.ref import AdapterRef
from manylora.config import Config
from manylora.engine.process import client as client_module
from manylora.engine.request import RequestOutput

pytestmark = pytest.mark.slow


def test_progress_and_the_memory_plan_are_announced(engine: Engine, config: Config) -> None:
    assert engine.lines[0] == f"manylora: loading model {config.model.path} ..."
    assert "pages" in engine.lines[1]
    assert (engine.ready.device, engine.ready.dtype, engine.ready.vocab_size) == (
        "cpu",
        "float32",
        640,
    )


def test_adapters_are_mixed_in_one_batch(
    engine: Engine, refs: dict[str, AdapterRef], prompt: list[int]
) -> None:
    client = engine.client
    requests = [
        question("base", prompt),
        *(question(name, prompt, refs[name]) for name in ADAPTERS),
    ]

    async def main() -> None:
        together = await asyncio.gather(*(collect(client, request) for request in requests))
        alone = [
            await collect(client, replace(request, request_id=f"{request.request_id}-2"))
            for request in requests
        ]
        assert [tokens_of(outputs) for outputs in together] == [
            tokens_of(outputs) for outputs in alone
        ]
        assert len({tuple(tokens_of(outputs)) for outputs in together}) == len(requests)
        assert [outputs[0].adapter_state for outputs in together] == ["base", *["stored"] * 5]
        assert [outputs[0].adapter_state for outputs in alone] == ["base", *["device"] * 5]
        # Loads come one after the other, so the first may have ended before the last; resident and long, all meet.
        long = [
            replace(r, request_id=f"{r.request_id}-3", params=endless("", prompt).params)
            for r in requests
        ]
        await asyncio.gather(*(collect(client, request) for request in long))
        status = await client.status()
        assert sum(status.pages.values()) == engine.ready.memory.num_pages
        assert max(step.adapters for step in status.last_steps) == 5

    engine.run(main())


def test_outputs_of_a_few_requests_are_passed_on_in_a_round_of_the_loop(
    engine: Engine, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "REQUESTS_A_ROUND", 2)
    came: defaultdict[int, set[str]] = defaultdict(set)
    round_index = 0

    async def count() -> None:
        nonlocal round_index
        while True:
            round_index += 1
            await asyncio.sleep(0)

    async def read(name: str) -> list[int]:
        outputs: list[RequestOutput] = []
        async for output in engine.client.generate(
            question(name, prompt, max_tokens=100, ignore_eos=True)
        ):
            if outputs:  # first tokens are passed on at once
                came[round_index].add(name)
            outputs.append(output)
        return tokens_of(outputs)

    async def main() -> None:
        counting = asyncio.create_task(count())
        answers = await asyncio.gather(*(read(f"round{number}") for number in range(8)))
        counting.cancel()
        assert len({tuple(answer) for answer in answers}) == 1
        assert len(answers[0]) == 100

    engine.run(main())
    assert max(len(names) for names in came.values()) == 2


def test_closing_the_iterator_gives_the_pages_back(engine: Engine, prompt: list[int]) -> None:
    async def main() -> None:
        async with aclosing(engine.client.generate(endless("closed", prompt))) as outputs:
            async for _ in outputs:
                break
        await eventually(lambda: is_idle(engine.client))

    engine.run(main())


def test_the_output_after_an_abort_tells_what_was_computed(
    engine: Engine, prompt: list[int]
) -> None:
    async def main() -> None:
        outputs: list[RequestOutput] = []
        async for output in engine.client.generate(endless("cut", prompt)):
            outputs.append(output)
            if len(outputs) == 3:
                engine.client.abort("cut")
        assert (outputs[-1].finish_reason, outputs[-1].computed_prompt_tokens) == (
            "abort",
            len(prompt),
        )
        reading = asyncio.create_task(collect(engine.client, endless("at once", prompt)))
        await asyncio.sleep(0)
        engine.client.abort("at once")
        *tokens, last = await reading  # it may be met in the queue, or after its first step
        assert (last.finish_reason, last.computed_prompt_tokens) == (
            "abort",
            len(prompt) if tokens else 0,
        )
        for name in ("cut", "never heard of"):
            engine.client.abort(name)

    engine.run(main())


def test_a_pinned_adapter_comes_to_the_device_without_a_request_and_a_dropped_one_leaves(
    engine: Engine, refs: dict[str, AdapterRef]
) -> None:
    async def main() -> None:
        await engine.client.pin_adapter(refs["haiku"], True)
        await eventually(lambda: is_on_device(engine.client, refs["haiku"]), timeout_s=30)
        assert any(resident.pinned for resident in (await engine.client.status()).residents)
        await engine.client.pin_adapter(refs["haiku"], False)
        assert not any(resident.pinned for resident in (await engine.client.status()).residents)
        await engine.client.drop_adapter(refs["haiku"].digest)
        residents = (await engine.client.status()).residents
        assert refs["haiku"].digest not in {resident.digest for resident in residents}

    engine.run(main())


def test_the_client_knows_whose_weights_are_in_use(
    engine: Engine, refs: dict[str, AdapterRef], prompt: list[int]
) -> None:
    client = engine.client
    weights = refs["pirate"].weights_sha256

    async def main() -> None:
        request = question("in use", prompt, refs["pirate"], max_tokens=900, ignore_eos=True)
        async with aclosing(client.generate(request)) as outputs:
            await anext(outputs)
            assert client.uses(weights)
            assert not client.uses(refs["shout"].weights_sha256)
        assert not client.uses(weights)

    engine.run(main())


def test_a_first_token_is_passed_on_before_others_that_have_piled_up(
    engine: Engine, prompt: list[int]
) -> None:
    client, heard = engine.client, []
    begun = {"old": asyncio.Event(), "new": asyncio.Event()}

    async def listen(name: str) -> None:
        async with aclosing(client.generate(endless(name, prompt))) as outputs:
            async for _ in outputs:
                heard.append(name)
                begun[name].set()

    async def main() -> None:
        old = asyncio.create_task(listen("old"))
        await begun["old"].wait()
        new = asyncio.create_task(listen("new"))
        await asyncio.sleep(0)  # it asks the engine
        heard.clear()
        time.sleep(1.0)  # noqa: ASYNC251 - the event loop is late: outputs of several steps wait for it
        await begun["new"].wait()
        assert heard[0] == "new"
        for task in (old, new):
            task.cancel()
        await asyncio.gather(old, new, return_exceptions=True)

    engine.run(main())
