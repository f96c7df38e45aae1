"""Checkpoints are loaded strictly: every tensor expected, present, and of its shape."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file

from manylora.engine.execution.memory_plan import model_bytes
from manylora.engine.model.checkpoint.quantise import quantise
from manylora.engine.model.checkpoint.weights import base_digest, load_decoder
from manylora.engine.model.decoder import Decoder
from manylora.engine.model.spec import expected_tensors, read_spec, resolve_model
from manylora.engine.model.weight_files import weight_files
from manylora.errors import ConfigError
from tiny_models import make_model, with_own_head

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]
NORM, Q_BIAS = "model.norm.weight", "model.layers.0.self_attn.q_proj.bias"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("sharded"), "llama", sharded=True)


@pytest.fixture
def changed(model: Path, tmp_path: Path) -> Callable[[Callable[[Tensors], object]], Path]:
    """A copy of the model after a change of its tensors."""

    def change(edit: Callable[[Tensors], object]) -> Path:
        folder = tmp_path / "changed"
        shutil.copytree(model, folder)
        tensors = load_file(folder / "model.safetensors")
        edit(tensors)
        save_file(tensors, folder / "model.safetensors")
        return folder

    return change


def _load(folder: Path) -> Decoder:
    return load_decoder(folder, read_spec(folder), torch.float32, CPU)


def _logits(folder: Path) -> torch.Tensor:
    """What the head makes of some hidden rows."""
    return _load(folder).logits(torch.linspace(-1, 1, 128).reshape(2, 64))


@pytest.mark.parametrize(
    ("architecture", "tied"),
    [("llama", False), ("mistral", True), ("qwen2", True), ("qwen3", True)],
)
def test_the_parameters_are_those_of_the_files(
    architecture: str, tied: bool, tmp_path: Path
) -> None:
    folder = make_model(tmp_path, architecture, tied=tied)
    tensors = load_file(folder / "model.safetensors")
    spec = read_spec(folder)
    assert expected_tensors(spec) == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert spec.num_parameters == sum(tensor.numel() for tensor in tensors.values())


def test_shards_are_found_by_the_index(sharded: Path) -> None:
    assert len(weight_files(sharded)) > 2
    _load(sharded)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (
            lambda t: t.pop("model.layers.1.mlp.up_proj.weight"),
            r"lacks model\.layers\.1\.mlp\.up_proj\.weight",
        ),
        (
            lambda t: t.update({Q_BIAS: torch.zeros(64)}),
            r"does not: model\.layers\.0\.self_attn\.q_proj\.bias",
        ),
        (
            lambda t: t.update({NORM: torch.zeros(63)}),
            r"model\.norm\.weight must be .*\[64\], got F32 \[63\]",
        ),
        (
            lambda t: t.update({NORM: torch.zeros(64, dtype=torch.int32)}),
            r"model\.norm\.weight must be a float tensor",
        ),
    ],
    ids=["missing", "unexpected", "wrong shape", "whole numbers"],
)
def test_a_tensor_that_does_not_fit_is_named(
    edit: Callable[[Tensors], object], said: str, changed: Callable[..., Path]
) -> None:
    with pytest.raises(ConfigError, match=said):
        _load(changed(edit))


def test_leftovers_of_older_checkpoints_are_harmless(
    model: Path, changed: Callable[..., Path]
) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    folder = changed(lambda tensors: tensors.update({name: torch.zeros(8)}))
    assert torch.equal(_logits(folder), _logits(model))


def test_an_equal_copy_of_the_embedding_is_no_head_of_its_own(tmp_path: Path) -> None:
    folder = make_model(tmp_path, "qwen2", tied=True)
    expected = _logits(folder)
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()},
        folder / "model.safetensors",
    )
    assert read_spec(folder).is_tied
    assert expected.any()
    assert torch.equal(_logits(folder), expected)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_head_in_the_files_outranks_the_config(
    tmp_path: Path, is_sharded: bool, caplog: pytest.LogCaptureFixture
) -> None:
    folder = with_own_head(make_model(tmp_path, "qwen2", tied=True, sharded=is_sharded))
    spec = read_spec(folder)
    assert not spec.is_tied
    assert "tie_word_embeddings" in caplog.text
    assert spec.num_parameters == sum(
        tensor.numel()
        for file in folder.glob("*.safetensors")
        for tensor in load_file(file).values()
    )
    tied = replace(spec, is_tied=True)
    own_bytes = 320 * 64 * 4
    for on_cpu in (False, True):
        more = model_bytes(spec, "bf16", 4, on_cpu=on_cpu) - model_bytes(
            tied, "bf16", 4, on_cpu=on_cpu
        )
        assert more == (0 if on_cpu else own_bytes)


def test_an_index_tells_of_a_head_where_the_weights_are_not_there(tmp_path: Path) -> None:
    folder = with_own_head(make_model(tmp_path, "llama", tied=True, sharded=True))
    for file in folder.glob("*.safetensors"):
        file.unlink()
    assert not read_spec(folder).is_tied
    (folder / "model.safetensors.index.json").unlink()
    assert read_spec(folder).is_tied


@pytest.mark.parametrize(
    "offsets", [[10**9, 2**70], [-9, -1], [0.5, 5.5], [4, 0], [0], ["0", "8"], None]
)
def test_a_tensor_outside_its_file_is_one_line(tmp_path: Path, offsets: object) -> None:
    folder = make_model(tmp_path, "qwen2", tied=True)
    path = folder / "model.safetensors"
    length = int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(path.read_bytes()[8 : 8 + length])
    header["model.embed_tokens.weight"]["data_offsets"] = offsets
    changed = json.dumps({**header, "lm_head.weight": header["model.embed_tokens.weight"]}).encode()
    path.write_bytes(len(changed).to_bytes(8, "little") + changed + path.read_bytes()[8 + length :])
    with pytest.raises(ConfigError, match="cannot read"):
        read_spec(folder)


def test_a_quantised_checkpoint_keeps_its_own_head(tmp_path: Path) -> None:
    source = with_own_head(make_model(tmp_path / "source", "qwen2", tied=True))
    quantise(source, tmp_path / "made", "int8")
    assert not read_spec(tmp_path / "made").is_tied
    head = load_file(tmp_path / "made" / "model.safetensors")["lm_head.weight"]
    assert torch.equal(head, load_file(source / "model.safetensors")["lm_head.weight"])


def test_a_broken_file_of_weights_is_refused(tmp_path: Path) -> None:
    folder = make_model(tmp_path, "qwen2", tied=True)
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ConfigError, match="cannot read"):
        read_spec(folder)


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ConfigError, match="only safetensors"):
        weight_files(tmp_path)


@pytest.mark.parametrize(
    "index",
    [
        *(
            '{"weight_map": {"a": "../model.safetensors"}}',
            '{"weight_map": {"a": "gone.safetensors"}}',
            "{}",
            "[1",
            "[]",
        ),
        *(
            '{"weight_map": {"a": "x", "a": "y"}}',
            '{"weight_map": NaN}',
            "[" * 5000,
            '{"weight_map": {"a": "\\ud800"}}',
        ),
    ],
)
def test_a_broken_index_is_refused(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ConfigError, match=r"index\.json"):
        weight_files(tmp_path)


def test_a_truncated_file_is_refused(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cut"
    shutil.copytree(model, folder)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-8])
    with pytest.raises(ConfigError, match="cannot read"):
        _load(folder)


def test_the_digest_follows_weights_and_config(model: Path, changed: Callable[..., Path]) -> None:
    digest = base_digest(model)
    folder = changed(lambda tensors: tensors["model.norm.weight"].add_(1))
    assert digest.startswith("sha256:")
    assert len(digest) == 7 + 64
    assert digest == base_digest(model)
    assert digest != base_digest(folder)
    shutil.copy(model / "model.safetensors", folder)
    assert digest == base_digest(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    assert digest != base_digest(folder)


def test_a_folder_is_taken_as_it_is(model: Path) -> None:
    assert resolve_model(str(model)) == model


@pytest.mark.parametrize("path", ["/nowhere/model", "../x", "a/b/c", "~"])
def test_what_is_neither_a_folder_nor_a_hub_id_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match=r"model\.path"):
        resolve_model(path)


def test_a_hub_id_is_downloaded_without_code_and_duplicates(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, object] = {}

    def download(repo_id: str, **patterns: object) -> str:
        asked.update(patterns, repo_id=repo_id)
        return str(model)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model("some-org/Some-Model_1.5") == model
    assert asked["repo_id"] == "some-org/Some-Model_1.5"
    patterns = map(str, asked["allow_patterns"])  # type: ignore[call-overload]
    assert not any(pattern.endswith((".py", ".bin", "*")) for pattern in patterns)
    assert "consolidated*" in asked["ignore_patterns"]  # type: ignore[operator]


def test_a_hub_that_does_not_deliver_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(repo_id: str, **patterns: object) -> str:
        raise LocalEntryNotFoundError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(
        ConfigError, match=r"'org/model', and the Hugging Face hub did not deliver it"
    ):
        resolve_model("org/model")
