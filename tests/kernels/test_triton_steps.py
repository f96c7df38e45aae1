"""Steps of a whole decoder on the Triton kernels, with adapters: the numbers of transformers and PEFT."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from implementations import CPU, INTERPRETS, TRITON
from manylora.adapters.lora import step as lora_step
from manylora.adapters.lora.step import fill_tiles, tile_capacity
from manylora.engine.execution.packed_step import host_rows, host_slots, pack_step
from manylora.engine.model.checkpoint import weights
from manylora.engine.model.decoder import KvViews
from step_driver import StepDriver
from tiny_models import ALL_LINEAR, load_reference, make_adapter, make_model, reference_logits

pytestmark = pytest.mark.skipif(not INTERPRETS, reason="needs Triton's interpreter")
PROMPTS = [[5, 9, 200], [7], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [300, 20], [44, 45, 46]]


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
@torch.inference_mode()
def test_a_mixed_batch_equals_peft_and_a_static_step_has_the_same_bits(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (weights, lora_step):
        monkeypatch.setattr(module, "kernels_for", lambda *_: TRITON.kernels)
    model = make_model(tmp_path / "model", architecture, num_hidden_layers=2)
    folders = [
        None,
        make_adapter(model, tmp_path / "few sites", targets=("q_proj", "v_proj"), rank=16),
        make_adapter(model, tmp_path / "all sites", targets=ALL_LINEAR, rank=13, seed=2),
        make_adapter(
            model,
            tmp_path / "one layer",
            targets=("o_proj", "up_proj"),
            layers_to_transform=[1],
            seed=3,
        ),
    ]
    driver = StepDriver(model)
    slots = [None if folder is None else driver.load_adapter(folder) for folder in folders]
    order = [2, 0, 1, 3, 2]
    requests = [
        driver.request(tokens, slots[which]) for tokens, which in zip(PROMPTS, order, strict=True)
    ]
    first = driver.logits(requests)
    for request in requests:
        request.token_ids.append(17)

    # Once with the adapters as they are prepared, once as a captured step has them.
    plan = driver.plan([driver.chunk(request) for request in requests], [])
    step = pack_step(plan, driver.geometry, driver.arena.num_pages)
    rows = host_rows(step, driver.geometry.page_tokens, CPU)
    row_slots = host_slots(step, rows)
    kv = KvViews.of(driver.arena, driver.decoder.spec.sliding_windows)
    decoder = driver.decoder
    num_rows = len(row_slots)
    eager = decoder.logits(decoder.forward(rows, kv, driver.lora.prepare(row_slots)))
    tiles = np.empty((3, tile_capacity(num_rows, driver.tables.slots, 16)), dtype=np.int32)
    fill_tiles(tiles, row_slots, 16)
    static_rows = replace(
        rows,
        tokens=torch.arange(-1, -1 - num_rows, -1, dtype=torch.int32),
        positions=rows.positions.int(),
        slot_mapping=tuple(slots.int() for slots in rows.slot_mapping),
        sampled=rows.tokens.int(),
    )
    static = decoder.logits(
        decoder.forward(static_rows, kv, driver.lora.static_step(torch.from_numpy(tiles), 16))
    )
    assert torch.equal(static, eager)

    for place, (tokens, which) in enumerate(zip(PROMPTS, order, strict=True)):
        got = torch.cat((first[place], eager[step.chunk_rows[place]][None]))
        expected = reference_logits(load_reference(model), [*tokens, 17], folders[which])
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
