"""Whole checkpoints: the good ones are understood, every bad one is refused by name, quickly and in little memory."""

from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bad_upload import EVIL_REGEX, BadUpload, Upload
from bad_uploads import bad_uploads, good_upload
from counted_calls import MOST_CALLS, counted_calls
from lora_files import (
    RawTensor,
    base_shape,
    config_bytes,
    lora_name,
    lora_tensors,
    mlx_config_bytes,
    mlx_tensors,
    q_and_v,
    tensor,
    weights_bytes,
)
from manylora.adapters.base_shape import MODULE_PATHS
from manylora.adapters.checkpoint.findings import MAX_FINDINGS
from manylora.adapters.checkpoint.reader import Checkpoint, check_weights, read_checkpoint
from manylora.adapters.ref import LoraSpec
from manylora.errors import AdapterError, AdapterFormatError, PayloadTooLargeError
from manylora.server.errors import error_body
from refusals import is_presentable, outcome

BASE = base_shape()
BAD_UPLOADS = bad_uploads(BASE)


def read(folder: Path, upload: Upload, **options: Any) -> Checkpoint:
    weights = folder / "weights"
    weights.write_bytes(upload.weights)
    return read_checkpoint(
        upload.config, weights, options.pop("base", BASE), options.pop("max_rank", 64), **options
    )


def refusal(
    folder: Path, weights: bytes, config: bytes | None = None, **options: Any
) -> AdapterError:
    with pytest.raises(AdapterError) as caught:
        read(folder, Upload(config_bytes() if config is None else config, weights), **options)
    return caught.value


def test_a_good_upload_is_understood(tmp_path: Path) -> None:
    checkpoint = read(tmp_path, good_upload(BASE))
    assert checkpoint.ranks == {(0, 0): 8, (0, 2): 8, (1, 0): 8, (1, 2): 8}
    assert checkpoint.scalings == dict.fromkeys(checkpoint.ranks, 2.0)
    assert checkpoint.target_modules == ("q_proj", "v_proj")
    assert (checkpoint.applied, checkpoint.total, checkpoint.largest_rank) == (4, 14, 8)
    assert checkpoint.parameters == 2 * (8 * (64 + 64) + 8 * (64 + 32))
    places = [tuple(tensor.name.place) for tensor in checkpoint.tensors]
    assert places == sorted(places)
    assert len(places) == 8


def test_tensor_positions_are_those_of_the_bytes(tmp_path: Path) -> None:
    tensors = q_and_v(BASE)
    upload = Upload(config_bytes(), weights_bytes(tensors))
    for found, name in read(tmp_path, upload).tensors:
        layer, module, part = name.place
        raw = tensors[lora_name(layer, BASE.modules[module].path, part.upper())]
        assert upload.weights[found.start : found.end] == raw.data
        assert (found.shape, found.dtype) == (raw.shape, raw.dtype)


@pytest.mark.parametrize("case", BAD_UPLOADS, ids=[case.name for case in BAD_UPLOADS])
def test_bad_uploads_are_refused_by_name(
    tmp_path: Path, case: BadUpload, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    upload = case.make()
    with pytest.raises((PayloadTooLargeError, AdapterError)) as caught, counted_calls() as calls:
        read(tmp_path, upload)
    assert calls() < MOST_CALLS
    assert not (tmp_path / "PWNED").exists()
    error = caught.value
    assert isinstance(error, PayloadTooLargeError) == (case.status == 413)
    assert (error.code, error.message.isprintable(), error.message.isascii()) == (
        case.code,
        True,
        True,
    )
    assert 20 < len(error.message) < 800
    body = error_body(error)["error"]
    assert len(json.dumps(body)) < 16 << 10
    if isinstance(error, AdapterError):
        first = error.findings[0]
        assert (first.code, first.param, f"{first.message} {first.hint}") == (
            error.code,
            error.param,
            error.message,
        )
        assert len(error.findings) <= MAX_FINDINGS
        texts = [
            text
            for found in error.findings
            for text in (found.message, found.hint, found.param or "")
        ]
        assert all(text.isascii() and text.isprintable() for text in texts)
        assert all(len(found.hint) > 8 for found in error.findings)
        assert [*body] == ["message", "type", "param", "code", "findings"]
        assert body["findings"][0]["code"] == body["code"]  # type: ignore[index]


def test_there_are_hundreds_of_bad_uploads_of_every_code() -> None:
    assert len(BAD_UPLOADS) > 250
    assert len({case.code for case in BAD_UPLOADS}) > 25


@pytest.mark.parametrize(
    "name",
    [
        "container: a million empty tensors",
        "container: header: a quote without end",
        "container: header: nested lists",
        "container: header: a long number",
        "config: nested 200,000 lists",
    ],
)
def test_the_costliest_uploads_take_little_memory(tmp_path: Path, name: str) -> None:
    upload = next(case for case in BAD_UPLOADS if case.name == name).make()
    (tmp_path / "weights").write_bytes(upload.weights)
    tracemalloc.start()
    try:
        with pytest.raises(AdapterError):
            read_checkpoint(upload.config, tmp_path / "weights", BASE, 64)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


def test_a_header_full_of_empty_objects_takes_little_work_and_memory(tmp_path: Path) -> None:
    raw = b'{"a":[' + b"{}," * 349_000 + b"{}]}"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with counted_calls() as calls:
        error = refusal(tmp_path, len(raw).to_bytes(8, "little") + raw)
    assert error.code == "weights.header_invalid"
    assert calls() < MOST_CALLS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


@pytest.mark.timeout(60)
def test_a_hostile_target_pattern_is_never_run(tmp_path: Path) -> None:
    """It would run for ages."""
    config = config_bytes(
        target_modules=EVIL_REGEX, exclude_modules=EVIL_REGEX, layers_pattern=EVIL_REGEX
    )
    checkpoint = read(tmp_path, Upload(config, weights_bytes(q_and_v(BASE))))
    assert checkpoint.applied == 4


def test_the_largest_legal_config_of_patterns_takes_little_work(tmp_path: Path) -> None:
    base = base_shape(hidden=8, intermediate=8, kv=8, num_layers=500)
    ranks = {(layer, module): 1 for layer in range(500) for module in range(7)}
    pattern = {f"[a-m]+_{index}": 1 for index in range(64)} | {
        f"m{index}": 1 for index in range(960)
    }
    config = config_bytes(r=1, lora_alpha=1, rank_pattern=pattern, alpha_pattern=pattern)
    upload = Upload(config, weights_bytes(lora_tensors(base, ranks)))
    with counted_calls() as calls:
        assert read(tmp_path, upload, base=base).applied == 3500
    assert calls() < MOST_CALLS


def test_ranks_in_the_file_decide(tmp_path: Path) -> None:
    ranks = {(0, 0): 4, (0, 2): 8, (1, 0): 4, (1, 2): 8}
    weights = weights_bytes(lora_tensors(BASE, ranks))
    above = config_bytes(
        r=200, lora_alpha=16, rank_pattern={"(q|k)_proj": 4, "v_proj": 8, "lm_head": 0}
    )
    for config, rank in ((above, 200), (config_bytes(r=None), 4)):
        checkpoint = read(tmp_path, Upload(config, weights))
        assert checkpoint.ranks == ranks
        assert checkpoint.scalings == {place: 16 / own for place, own in ranks.items()}
        assert checkpoint.spec.rank == rank
        loaded = check_weights(checkpoint.spec, weights, len(weights), BASE)
        assert (loaded.ranks, loaded.scalings) == (ranks, checkpoint.scalings)
    assert (
        refusal(tmp_path, weights, config_bytes(r=200, rank_pattern={"q_proj": 4})).code
        == "weights.rank_mismatch"
    )


def test_a_config_without_alpha_has_pefts_and_its_owner_is_told(tmp_path: Path) -> None:
    config = json.loads(config_bytes())
    del config["lora_alpha"]
    checkpoint = read(tmp_path, Upload(json.dumps(config).encode(), weights_bytes(q_and_v(BASE))))
    assert set(checkpoint.scalings.values()) == {1.0}
    assert "no lora_alpha" in str(checkpoint.report["warnings"])


def test_a_pattern_may_name_every_module_from_the_beginning_but_not_by_thousands_of_regexes(
    tmp_path: Path,
) -> None:
    ranks = {(layer, module): layer + 1 for layer in range(2) for module in range(7)}
    weights = weights_bytes(lora_tensors(BASE, ranks))
    paths = {
        f"^model.layers.{layer}.{MODULE_PATHS[module]}": rank
        for (layer, module), rank in ranks.items()
    }
    config = config_bytes(
        rank_pattern=paths, alpha_pattern=paths | {f"^model.layers.{n}.x": 1 for n in range(1000)}
    )
    checkpoint = read(tmp_path, Upload(config, weights))
    assert (checkpoint.ranks, set(checkpoint.scalings.values())) == (ranks, {1.0})
    many = config_bytes(rank_pattern={f"x+{index}": 1 for index in range(65)})
    assert refusal(tmp_path, weights, many).code == "config.pattern_unsupported"


def test_without_a_base_widths_must_agree_between_layers(tmp_path: Path) -> None:
    assert read(tmp_path, good_upload(BASE), base=None).total == 14
    odd = {**q_and_v(BASE), lora_name(1, "self_attn.q_proj", "A"): tensor((8, 32))}
    assert refusal(tmp_path, weights_bytes(odd), base=None).code == "weights.shape_mismatch"
    foreign = {**q_and_v(BASE), "base_model.model.model.embed_tokens.weight": tensor((8, 64))}
    assert refusal(tmp_path, weights_bytes(foreign), base=None).code == "weights.tensor_not_allowed"


def test_an_adapter_of_another_base_is_told_so(tmp_path: Path) -> None:
    error = refusal(tmp_path, good_upload(base_shape(hidden=128)).weights)
    assert error.code == "weights.shape_mismatch"
    assert "another base" in error.message
    assert "[8, 128]" in error.message
    assert "[8, 64]" in error.message


def test_refusals_tell_the_hint(tmp_path: Path) -> None:
    assert (
        "max_rank"
        in refusal(
            tmp_path, weights_bytes(q_and_v(BASE, rank=33)), config_bytes(r=33), max_rank=32
        ).message
    )
    flipped = {**q_and_v(BASE), lora_name(0, "self_attn.q_proj", "A"): tensor((64, 8))}
    assert "transposed" in refusal(tmp_path, weights_bytes(flipped)).message


def test_a_bad_value_is_found_at_its_place_beyond_the_first_window(tmp_path: Path) -> None:
    base = base_shape(hidden=1 << 19, kv=8, intermediate=8, num_layers=1)
    tensors = lora_tensors(base, {(0, 1): 4})
    name = lora_name(0, "self_attn.k_proj", "A")
    spoilt = bytearray(tensors[name].data)
    position = 3 * (1 << 19) + 17
    spoilt[4 * position : 4 * position + 4] = b"\x00\x00\xc0\x7f"
    tensors[name] = type(tensors[name])("F32", (4, 1 << 19), bytes(spoilt))
    error = refusal(tmp_path, weights_bytes(tensors), config_bytes(r=4), base=base)
    assert error.code == "weights.non_finite"
    assert "[3, 17]" in error.message


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_values_up_to_the_limit_are_served(tmp_path: Path, dtype: str) -> None:
    at_limit = {
        **q_and_v(BASE),
        lora_name(0, "self_attn.q_proj", "A"): tensor((8, 64), dtype, -1e4),
    }
    assert read(tmp_path, Upload(config_bytes(), weights_bytes(at_limit))).applied == 4
    beyond = {
        **q_and_v(BASE),
        lora_name(0, "self_attn.q_proj", "A"): tensor((8, 64), dtype, 1.01e4),
    }
    assert refusal(tmp_path, weights_bytes(beyond)).code == "weights.value_too_large"


def test_values_are_not_read_when_they_need_not_be(tmp_path: Path) -> None:
    tensors = {
        **q_and_v(BASE),
        lora_name(0, "self_attn.q_proj", "A"): tensor((8, 64), value=float("nan")),
    }
    assert (
        read(tmp_path, Upload(config_bytes(), weights_bytes(tensors)), scan_values=False).applied
        == 4
    )


NAME_PARTS = (
    "base_model",
    "model",
    "layers",
    "0",
    "2",
    "self_attn",
    "mlp",
    "q_proj",
    "down_proj",
    "lora_A",
    "lora_B",
)
NAME_EXTRAS = (
    "weight", "default", "other", "language_model", "module", "lora_a", "lora_b", "_orig_mod", "_fsdp_wrapped_module",
    "lm_head", "bias", "", "..", "x" * 90,
)  # fmt: skip
NAMES = st.lists(st.sampled_from(NAME_PARTS + NAME_EXTRAS), max_size=10).map(
    ".".join
) | st.sampled_from(
    [lora_name(layer, path, part) for layer in (0, 1, 2) for path in MODULE_PATHS for part in "AB"]
)
SIZES = st.sampled_from([0, 1, 4, 8, 32, 64, 112])


@settings(max_examples=150, deadline=None)
@given(
    extra=st.dictionaries(NAMES, st.lists(SIZES, max_size=3).map(tuple), max_size=3),
    dropped=st.sets(st.integers(0, 7), max_size=2),
    fields=st.sampled_from(
        [{}, {"r": 1}, {"r": 4}, {"rank_pattern": {"q_proj": 4}}, {"rank_pattern": {"0.x": 4}}]
    ),
    with_base=st.booleans(),
)
def test_no_mixture_of_names_and_shapes_does_more_than_a_refusal(
    tmp_path_factory: pytest.TempPathFactory,
    extra: dict[str, tuple[int, ...]],
    dropped: set[int],
    fields: dict[str, Any],
    with_base: bool,
) -> None:
    kept = {
        name: raw for index, (name, raw) in enumerate(q_and_v(BASE).items()) if index not in dropped
    }
    tensors = {**kept, **{name: tensor(shape) for name, shape in extra.items()}}
    upload = Upload(config_bytes(**fields), weights_bytes(tensors))
    folder = tmp_path_factory.getbasetemp()
    found = outcome(lambda: read(folder, upload, base=BASE if with_base else None))
    if isinstance(found, AdapterError):
        assert is_presentable(found, "weights.")
        return
    assert len(found.tensors) == 2 * found.applied == len(tensors)
    assert found.largest_rank == max(found.ranks.values()) <= 8


@pytest.mark.parametrize("options", [["-P"], ["-P", "-OO"]])
def test_uploads_are_checked_without_torch_and_with_assertions_off(
    tmp_path: Path, options: list[str]
) -> None:
    upload = good_upload(BASE)
    (tmp_path / "weights").write_bytes(upload.weights[:-1])
    (tmp_path / "config").write_bytes(upload.config)
    script = (
        "import sys\nfrom pathlib import Path\nimport manylora.adapters.blobs.local, manylora.adapters.lora.layout\n"
        "from manylora.adapters.checkpoint.reader import read_checkpoint\n"
        "from manylora.errors import AdapterError\n"
        "try:\n    read_checkpoint(Path('config').read_bytes(), Path('weights'), None, 64)\n"
        "except AdapterError as error:\n    print(error.code)\n"
        "print({'torch', 'safetensors', 'peft', 'transformers', 'pickle5'} & set(sys.modules))\n"
    )
    result = subprocess.run(
        [sys.executable, *options, "-c", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.split() == ["weights.truncated", "set()"]


def test_mlx_matrices_are_the_transposes(tmp_path: Path) -> None:
    checkpoint = read(tmp_path, Upload(mlx_config_bytes(), weights_bytes(mlx_tensors(BASE))))
    assert checkpoint.spec == LoraSpec(rank=6, alpha=15.0)
    assert {(name.place.part, name.rank_axis) for _, name in checkpoint.tensors} == {
        ("a", 1),
        ("b", 0),
    }
    assert set(checkpoint.scalings.values()) == {2.5}
    assert checkpoint.parameters == sum(math.prod(raw.shape) for raw in mlx_tensors(BASE).values())


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"model.layers.0.self_attn.q_proj.lora_a": tensor((6, 64))}, "weights.shape_mismatch"),
        ({"model.layers.0.self_attn.q_proj.lora_a": tensor((64, 5))}, "weights.rank_mismatch"),
        ({"model.layers.0.self_attn.q_proj.lora_a": tensor((2, 64, 6))}, "weights.shape_invalid"),
        ({"model.layers.0.mlp.up_proj.lora_a": tensor((64, 6))}, "weights.pair_incomplete"),
        ({"model.layers.2.self_attn.q_proj.lora_a": tensor((64, 6))}, "weights.tensor_not_allowed"),
        ({"model.layers.0.self_attn.q_proj.m": tensor((64, 1))}, "weights.tensor_not_allowed"),
        ({"model.embed_tokens.lora_a": tensor((64, 6))}, "weights.tensor_not_allowed"),
        ({lora_name(0, "mlp.up_proj", "A"): tensor((6, 64))}, "weights.tensor_not_allowed"),
        ({lora_name(0, "self_attn.q_proj", "A"): tensor((6, 64))}, "weights.duplicate_tensor"),
        (
            {"_orig_mod.model.layers.0.mlp.up_proj.lora_a": tensor((64, 6))},
            "weights.tensor_not_allowed",
        ),
        (
            {"base_model.model.model.layers.0.mlp.up_proj.lora_a": tensor((64, 6))},
            "weights.tensor_not_allowed",
        ),
    ],
    ids=str,
)
def test_mlx_files_are_checked_as_strictly(
    tmp_path: Path, change: dict[str, RawTensor], expected: str
) -> None:
    assert (
        refusal(tmp_path, weights_bytes({**mlx_tensors(BASE), **change}), mlx_config_bytes()).code
        == expected
    )


def test_the_report_tells_what_looks_like_a_mistake(tmp_path: Path) -> None:
    config = config_bytes(
        base_model_name_or_path="Some/Base-unsloth-bnb-4bit/",
        target_modules=["q_proj", "v_proj", *(f"gone_{index}" for index in range(10))],
    )
    tensors = {**q_and_v(BASE), lora_name(1, "self_attn.q_proj", "B"): tensor((64, 8), "BF16", 0.0)}
    (tmp_path / "weights").write_bytes(weights_bytes(tensors))

    def report(*base_names: str) -> dict[str, Any]:
        found = read_checkpoint(config, tmp_path / "weights", BASE, 64, base_names=base_names)
        return dict(found.report)

    assert report() == report("shop", "base")
    assert report()["dtype"] == ["BF16", "F32"]
    zeros, gone = report()["warnings"]
    assert zeros.startswith("1 of 4 lora_B are zero")
    assert "'gone_0'" in gone
    assert "and 2 more" in gone
    assert "'Some/Base-unsloth-bnb-4bit/', here it is 'shop'" in report("shop")["warnings"][-1]
    loaded = check_weights(
        LoraSpec(rank=8, alpha=16), weights_bytes(tensors), len(weights_bytes(tensors)), BASE
    )
    assert loaded.report == {}


def test_a_report_of_the_largest_config_takes_little_work_and_is_short(tmp_path: Path) -> None:
    keys = {f"m{index}.a.b.c.d": 1 for index in range(1024)}
    config = config_bytes(rank_pattern=keys, alpha_pattern=keys, target_modules=["x" * 4000])
    with counted_calls() as calls:
        report = read(tmp_path, Upload(config, weights_bytes(q_and_v(BASE)))).report
    assert calls() < MOST_CALLS
    assert len(json.dumps(report)) < 4000
    assert json.dumps(report).isprintable()


def test_links_and_folders_are_not_read(tmp_path: Path) -> None:
    upload = good_upload(BASE)
    (tmp_path / "real").write_bytes(upload.weights)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(OSError, match="symbolic link"):
        read_checkpoint(upload.config, tmp_path / "link", BASE, 64)
    with pytest.raises(AdapterFormatError):
        read_checkpoint(upload.config, tmp_path, BASE, 64)


def test_a_base_with_scaled_inputs_takes_no_adapter_of_the_original(tmp_path: Path) -> None:
    folded = replace(BASE, folds_input_scale=True)
    error = refusal(tmp_path, good_upload(BASE).weights, base=folded)
    assert error.code == "config.base_folds_scale"
    assert "model.adapters_trained_on_quantised: true" in error.finding.hint
    assert is_presentable(error, "config.")
    header = good_upload(BASE).weights
    with pytest.raises(AdapterError, match="AWQ or SmoothQuant"):
        check_weights(read(tmp_path, good_upload(BASE)).spec, header, len(header), folded)
