"""A refused adapter: all that is wrong with it, in every way to upload one, and on the command line."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from api_adapters import upload
from api_server import Api, Client
from bad_upload import Upload
from fake_engine import DEMO_MODEL, demo_ready
from lora_files import config_bytes, q_and_v, tensor, weights_bytes
from manylora.cli import make_app
from manylora.server.http.bodies import ErrorView
from piecewise_client import CONFIG, WEIGHTS, code, complete, put, send_all

pytestmark = pytest.mark.anyio

EXPECTED = [
    ("config.feature_unsupported", "fan_in_fan_out"),
    ("config.feature_unsupported", "use_dora"),
    ("weights.tensor_not_allowed", "base_model.model.lm_head.weight"),
]


def bad() -> Upload:
    tensors = {**q_and_v(demo_ready().base), "base_model.model.lm_head.weight": tensor((8, 64))}
    return Upload(config_bytes(use_dora=True, fan_in_fan_out=True), weights_bytes(tensors))


def places(error: dict[str, Any]) -> list[tuple[str, str]]:
    return [(finding["code"], finding["param"]) for finding in error["findings"]]


async def run(*arguments: str) -> Any:
    environ = {"NO_COLOR": "1", "COLUMNS": "200"}
    return await asyncio.to_thread(lambda: CliRunner().invoke(make_app(), arguments, env=environ))


async def test_a_form_in_pieces_and_its_replay_say_the_same(api: Api, acme: Client) -> None:
    refused = await upload(acme, "pirate", bad())
    assert code(refused) == (422, "config.feature_unsupported")
    error = ErrorView.model_validate_json(refused.content).error
    assert places(refused.json()["error"]) == EXPECTED
    first = error.findings[0]
    assert (error.code, error.param, error.message) == (
        first.code,
        first.param,
        f"{first.message} {first.hint}",
    )
    upload_id = await send_all(acme, bad())
    in_pieces = await complete(acme, upload_id)
    assert (in_pieces.status_code, in_pieces.content) == (422, refused.content)
    view = (await acme.get(f"/v1/uploads/{upload_id}")).json()
    assert (view["state"], view["result"]) == ("rejected", refused.json()["error"])
    again = await complete(acme, upload_id)
    assert (again.status_code, again.content) == (422, refused.content)
    assert code(await put(acme, upload_id, CONFIG, bad().config)) == (409, "upload.ended")
    staged = (api.services.config.server.data_dir / "uploads").rglob("*")
    assert (api.files(), [path for path in staged if path.is_file()]) == ([], [])


async def test_validate_and_push_print_the_same_numbered_list(api: Api, tmp_path: Path) -> None:
    folder, key = tmp_path / "mine", await api.key("acme")
    folder.mkdir()
    (folder / CONFIG).write_bytes(bad().config)
    (folder / WEIGHTS).write_bytes(bad().weights)
    found = await run("adapter", "validate", str(folder), "--model", str(DEMO_MODEL))
    assert found.exit_code == 2
    lines = found.stderr.splitlines()
    assert lines[0] == f"manylora: {folder} cannot be served:"
    assert lines[1:5] == [
        "  1. adapter_config.json: fan_in_fan_out is True: Manylora does not serve transposed base weights (Conv1D). "
        "(config.feature_unsupported)",
        "     Hint: Set it to false for linear layers.",
        "  2. adapter_config.json: use_dora is True: Manylora does not serve DoRA. (config.feature_unsupported)",
        "     Hint: Retrain with use_dora=false.",
    ]
    assert lines[5].startswith(
        "  3. adapter_model.safetensors: Tensor base_model.model.lm_head.weight is not allowed"
    )
    assert len(lines) == 7
    as_json = await run("adapter", "validate", str(folder), "--model", str(DEMO_MODEL), "--json")
    told = json.loads(as_json.stdout)
    assert (as_json.exit_code, told["valid"], places(told)) == (2, False, EXPECTED)
    async with api.listening() as url:
        pushed = await run("adapter", "push", str(folder), "--url", url, "--key", key)
        pushed_json = await run(
            "adapter", "push", str(folder), "--url", url, "--key", key, "--json"
        )
    assert (pushed.exit_code, pushed.stderr.splitlines()[1:]) == (2, lines[1:])
    assert (pushed_json.exit_code, json.loads(pushed_json.stdout)) == (2, told)


async def test_the_weights_are_called_as_their_file_is(tmp_path: Path) -> None:
    folder = tmp_path / "mlx"
    folder.mkdir()
    (folder / CONFIG).write_bytes(config_bytes())
    (folder / "adapters.safetensors").write_bytes(weights_bytes({"evil": tensor((8, 8))}))
    found = await run("adapter", "validate", str(folder))
    assert "  1. adapters.safetensors: Tensor evil is not allowed in an adapter." in found.stderr
    (folder / CONFIG).write_bytes(config_bytes().ljust(70_000))
    large = await run("adapter", "validate", str(folder))
    assert (large.exit_code, "(config.too_large)" in large.stderr, "Hint: " in large.stderr) == (
        2,
        True,
        True,
    )
