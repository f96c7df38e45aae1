from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import manylora
from api_adapters import sound, sound_mlx
from fake_engine import DEMO_MODEL
from manylora.cli import COMMANDS, make_app
from manylora.config import environment
from manylora.kernels.native import compilation, library
from manylora.kernels.native.levels import BF16
from manylora.server.settings import load_config, setting_names
from postgres_server import fresh_database
from recording_server import Recorder
from registry_samples import NEWEST

DEMO_ADAPTER = DEMO_MODEL.parent / "adapters" / "pirate"
SUMS = {"requests": 3, "prompt_tokens": 3, "cached_tokens": 0, "completion_tokens": 3}


def run(*arguments: str, **environ: str) -> Any:
    return CliRunner().invoke(
        make_app(), arguments, env={"NO_COLOR": "1", "COLUMNS": "200", **environ}
    )


def test_help_lists_every_command_and_shows_defaults_and_variables() -> None:
    assert set(COMMANDS) <= set(run("--help").output.split())
    for words in ("version", "--version"):
        assert run(words).output == f"manylora {manylora.__version__}\n"
    text = run("serve", "--help").output
    for part in ("[default: 8000]", "[env: MANYLORA_MODEL__PATH]", "[default: manylora-data]"):
        assert part in text


def test_the_command_line_starts_without_heavy_imports() -> None:
    heavy = [
        "torch",
        "transformers",
        "numpy",
        "fastapi",
        "sqlalchemy",
        "pydantic",
        "httpx",
        "zmq",
        "rich.table",
    ]
    program = f"import sys, manylora.cli; manylora.cli.make_app(); print([m for m in {heavy} if m in sys.modules])"
    found = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"


def test_a_folder_is_validated_without_torch_or_a_server() -> None:
    program = (
        "import sys; from typer.testing import CliRunner; from manylora.cli import make_app\n"
        f"found = CliRunner().invoke(make_app(), ['adapter', 'validate', {str(DEMO_ADAPTER)!r}, '--model', "
        f"{str(DEMO_MODEL)!r}, '--json'])\n"
        "print(found.output); assert found.exit_code == 0; assert 'torch' not in sys.modules"
    )
    found = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True
    )
    assert json.loads(found.stdout)["valid"] is True


def test_a_bad_folder_exits_with_2_and_the_reason(tmp_path: Path) -> None:
    missing = run("adapter", "validate", str(tmp_path))
    assert missing.exit_code == 2
    assert "adapter_config.json" in missing.output
    (tmp_path / "adapter_config.json").write_bytes(sound().config)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"PK\x03\x04 not weights")
    broken = run("adapter", "validate", str(tmp_path), "--json")
    assert broken.exit_code == 2
    assert "weights." in broken.output


def test_a_folder_of_mlx_is_validated_with_what_was_noticed(mlx_folder: Path) -> None:
    found = run("adapter", "validate", str(mlx_folder), "--model", str(DEMO_MODEL))
    assert found.exit_code == 0, found.output
    assert "read as: mlx" in found.stdout
    assert (
        "warning: The config says that the base was 'meta/Big', here it is 'manylora-demo'"
        in found.stderr
    )
    as_json = json.loads(run("adapter", "validate", str(mlx_folder), "--json").stdout)
    assert as_json["report"] == {"dtype": ["F32"], "layout": "mlx", "renamed": 0, "warnings": []}
    (mlx_folder / "adapter_config.json").write_bytes(sound_mlx(fine_tune_type="dora").config)
    refused = run("adapter", "validate", str(mlx_folder))
    assert refused.exit_code == 2
    assert "mlx_lm.lora --fine-tune-type lora" in refused.stderr


def test_an_adapter_for_a_checkpoint_with_scaled_inputs_is_refused_unless_it_was_trained_on_it(
    tmp_path: Path,
) -> None:
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 32,
        "zero_point": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ("adapter", "validate", str(DEMO_ADAPTER), "--model", str(tmp_path))
    refused = run(*arguments)
    assert refused.exit_code == 2
    assert "model.adapters_trained_on_quantised" in refused.stderr
    taken = run(*arguments, "--trained-on-quantised")
    assert taken.exit_code == 0, taken.output


def test_a_pickle_in_a_folder_is_refused_with_the_command_that_converts_it(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_bytes(sound().config)
    (tmp_path / "adapter_model.bin").write_bytes(b"PK\x03\x04")
    found = run("adapter", "push", str(tmp_path))
    assert found.exit_code == 2
    assert "load('adapter_model.bin', weights_only=True" in found.stderr


@pytest.mark.parametrize(
    ("command", "called", "body"),
    [
        ("adapter ls", "GET /v1/adapters?limit=1000", None),
        ("adapter ls --tenant acme", "GET /v1/adapters?tenant=acme&limit=1000", None),
        ("adapter rm a --version 2", "DELETE /v1/adapters/a?version=2", None),
        ("adapter pin a", "PATCH /v1/adapters/a", {"pinned": True}),
        ("adapter pin a --copies 2", "PATCH /v1/adapters/a", {"pinned": True, "pinned_copies": 2}),
        ("adapter unpin a --tenant acme", "PATCH /v1/adapters/a?tenant=acme", {"pinned": False}),
        (
            "adapter alias a prod=2 default=1:90,3:10 old= --tenant acme",
            "PATCH /v1/adapters/a?tenant=acme",
            {"aliases": {"prod": 2, "default": {"1": 90, "3": 10}, "old": None}},
        ),
        (
            "adapter grant a ten_1 --version 2",
            "POST /v1/adapters/a/grants",
            {"tenant": "ten_1", "version": 2},
        ),
        ("adapter grant a ten_1 --withdraw", "DELETE /v1/adapters/a/grants/ten_1", None),
        ("tenant ls", "GET /v1/tenants?limit=1000", None),
        ("tenant create acme", "POST /v1/tenants", {"name": "acme", "limits": {}}),
        (
            "tenant create acme --weight 3 --limit adapters=none --limit requests_per_minute=60",
            "POST /v1/tenants",
            {
                "name": "acme",
                "limits": {"adapters": None, "requests_per_minute": 60},
                "weight": 3.0,
            },
        ),
        ("tenant weight ac/me 2.5", "PATCH /v1/tenants/ac%2Fme", {"weight": 2.5}),
        (
            "tenant limit acme adapters=none pinned_pages=2",
            "PATCH /v1/tenants/acme",
            {"limits": {"adapters": None, "stored_bytes": 9, "pinned_pages": 2}},
        ),
        ("tenant rm ac/me", "DELETE /v1/tenants/ac%2Fme", None),
        (
            "key create acme --scope infer --limit tokens_per_month=5 --expires-at 2027-01-01T00:00Z",
            "POST /v1/tenants/acme/keys",
            {
                "name": None,
                "scopes": ["infer"],
                "expires_at": "2027-01-01T00:00Z",
                "limits": {"tokens_per_month": 5},
            },
        ),
        ("key ls acme", "GET /v1/tenants/acme/keys", None),
        ("key revoke key_1", "DELETE /v1/keys/key_1", None),
        ("key rotate key_1 --grace-s 5", "POST /v1/keys/key_1/rotate", {"grace_s": 5}),
        ("audit --tenant acme", "GET /v1/audit?tenant=acme&limit=50", None),
        ("usage --by key --json", "GET /v1/usage?group_by=key", None),
        (
            "usage --by key --bucket 1d --tz Asia/Kolkata --top 3 --json",
            "GET /v1/usage?group_by=key&bucket=1d&tz=Asia%2FKolkata&top=3",
            None,
        ),
        (
            "usage --events --adapter a --adapter ''",
            "GET /v1/usage/events?adapter=a&adapter=",
            None,
        ),
        ("whoami --json", "GET /v1/me", None),
    ],
)
def test_a_command_calls_its_route(
    recorder: Recorder, command: str, called: str, body: object
) -> None:
    recorder.status = 204 if called.startswith("DELETE") else 200
    recorder.body |= {
        "name": "acme",
        "tenant": "other",
        "limits": {"adapters": 3, "stored_bytes": 9},
    }
    done = run(*shlex.split(command), MANYLORA_URL=recorder.url, MANYLORA_KEY="secret")
    assert done.exit_code == 0, done.output
    method, path, authorization, sent = recorder.calls[-1]
    assert (f"{method} {path}", authorization) == (called, "Bearer secret")
    assert (json.loads(sent) if sent else None) == body


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("adapter pin a", "pinned a"),
        ("adapter unpin a", "unpinned a"),
        ("adapter grant a ten_1 --version 2", "other may call a@2"),
    ],
)
def test_what_a_command_did_is_said(recorder: Recorder, command: str, said: str) -> None:
    recorder.body = {"object": "grant", "tenant": "other"}
    done = run(*command.split(), "--url", recorder.url)
    assert (done.exit_code, done.output) == (0, f"{said}\n")
    as_json = run(*command.split(), "--json", "--url", recorder.url)
    assert (as_json.exit_code, json.loads(as_json.output)) == (0, recorder.body)


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("tenant limit acme adapters", "NAME=NUMBER"),
        ("tenant limit acme =3", "NAME=NUMBER"),
        ("tenant limit acme adapters=", "a whole number from 0"),
        ("tenant limit acme adapters=-1", "a whole number from 0"),
        ("tenant limit acme adapters=1.5", "got 'adapters=1.5'"),
        *(
            (f"adapter alias a {word}", "ALIAS=VERSION")
            for word in ("prod", "prod=x", "prod=1:2,", "prod=1:-1", "prod=1:a,2:b")
        ),
        *(
            (f"adapter {command} acme/support", "support --tenant acme")
            for command in ("show", "rm", "pin", "unpin")
        ),
        *(
            (f"adapter {command} qv@1", "without a version, got 'qv@1'")
            for command in ("show", "rm", "pin", "unpin")
        ),
        ("adapter ls --key schl\u00fcssel", "MANYLORA_KEY"),
        ("adapter ls --key 'two\nlines'", "MANYLORA_KEY"),
    ],
)
def test_wrong_words_are_refused_before_any_call(
    recorder: Recorder, command: str, reason: str
) -> None:
    done = run(*shlex.split(command), "--url", recorder.url)
    assert (done.exit_code, reason in done.output) == (2, True), done.output
    assert not recorder.calls


def test_an_adapter_is_shown_with_its_versions_and_who_may_call_it(recorder: Recorder) -> None:
    adapter = {
        "name": "a",
        "aliases": {"default": 2},
        "description": "for tests",
        "report": {"warnings": ["odd"]},
    }
    grants = {
        "object": "list",
        "data": [{"tenant": "rival", "version": None}, {"tenant": "third", "version": 2}],
    }
    recorder.pages = [
        adapter,
        {"object": "list", "data": [{"version": 2, "digest": "sha256:0"}]},
        grants,
    ]
    done = run("adapter", "show", "a", "--tenant", "acme", "--url", recorder.url)
    lines = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    assert ["granted_to", "rival,third@2"] in lines
    assert ["description", "for tests"] in lines
    assert "warning: odd" in done.stderr
    parts = [path for _, path, _, _ in recorder.calls]
    assert parts == [f"/v1/adapters/a{part}?tenant=acme" for part in ("", "/versions", "/grants")]


@pytest.mark.parametrize(
    ("command", "message", "param", "told"),
    [
        (
            "adapter show a",
            "Name the tenant: ?tenant=NAME.",
            "tenant",
            "manylora: Name the tenant: --tenant NAME.",
        ),
        (
            "usage --by x",
            "group_by takes tenant, key.",
            "group_by",
            "manylora: --by takes tenant, key.",
        ),
        (
            "usage --start x",
            "start: Input should be a time.",
            "start",
            "manylora: --start: Input should be",
        ),
        ("adapter pin a", "Upload with activate=false.", "activate", "Upload with --no-activate."),
        (
            "key create acme --expires-at soon",
            "expires_at: Input should be a valid datetime.",
            "expires_at",
            "manylora: --expires-at: Input should be",
        ),
    ],
)
def test_errors_name_the_options_of_the_command(
    recorder: Recorder, command: str, message: str, param: str, told: str
) -> None:
    recorder.status = 400
    recorder.body = {
        "error": {"message": message, "type": "t", "param": param, "code": "invalid_value"}
    }
    done = run(*command.split(), "--url", recorder.url, "--key", "admin")
    assert (done.exit_code, told in done.output) == (2, True), done.output


def test_a_refusal_is_one_line_with_the_reason(recorder: Recorder) -> None:
    recorder.body = {
        "error": {"message": "There is none.", "type": "t", "param": None, "code": "not_found"}
    }
    for status, code in ((404, 1), (400, 2), (422, 2), (401, 1)):
        recorder.status = status
        refused = run("tenant", "show", "x", "--url", recorder.url)
        assert refused.exit_code == code
        assert "There is none. (not_found)" in refused.output
    assert "MANYLORA_KEY" in refused.output
    recorder.server.server_close()
    unreachable = run("tenant", "ls", "--url", "http://127.0.0.1:9")
    assert unreachable.exit_code == 1
    assert "manylora serve" in unreachable.output


@pytest.mark.parametrize("body", [[], None, "<html>"])
def test_another_server_at_the_url_is_named_as_such(recorder: Recorder, body: object) -> None:
    recorder.body = body
    for arguments in (("adapter", "ls"), ("usage",), ("tenant", "show", "x")):
        done = run(*arguments, "--url", recorder.url, "--key", "secret")
        assert (done.exit_code, "is no Manylora server" in done.output) == (1, True), done.output


def test_config_shows_what_serve_would_use_with_the_same_options() -> None:
    shown = run(
        "config", "show", "--model", "m", "--set", "server.host=::1", MANYLORA_SERVER__PORT="9"
    )
    assert [text in shown.output for text in ("path: m", "port: 9", "host: ::1")] == [True] * 3
    without = run("config", "show")
    assert (without.exit_code, "give --model" in without.output) == (2, True)


def test_config_writes_a_file_that_explains_each_setting_and_reads_as_the_defaults(
    tmp_path: Path,
) -> None:
    file = tmp_path / "manylora.yaml"
    assert run("config", "init", str(file)).exit_code == 0
    text = file.read_text()
    assert (
        '  # Device of the model: auto, cpu or cuda. auto takes a CUDA device if there is one.\n  #device: "auto"\n'
        in text
    )
    assert load_config({}, {}, file) == load_config({"model": {"path": "CHANGE-ME"}}, {})
    file.write_text(re.sub(r"^  #(\w)", r"  \1", text, flags=re.MULTILINE))
    assert load_config({}, {}, file) == load_config({"model": {"path": "CHANGE-ME"}}, {})
    assert all(f"  {name.partition('.')[2]}: " in file.read_text() for name in setting_names())
    again = run("config", "init", str(file))
    assert (again.exit_code, "manylora config init other.yaml" in again.output) == (2, True)
    homeless = run("config", "init", str(tmp_path / "none" / "manylora.yaml"))
    assert (homeless.exit_code, "folder that exists" in homeless.output) == (2, True)


def test_a_wrong_setting_exits_with_2(tmp_path: Path) -> None:
    command = [
        str(Path(sys.executable).with_name("manylora")),
        "serve",
        "--model",
        "m",
        "--port",
        "70000",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("manylora: server.port must be")


def test_the_doctor_finds_the_model_and_says_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def findings(*arguments: str) -> tuple[int, dict[str, dict[str, str]]]:
        done = run("doctor", "--data-dir", str(tmp_path), "--json", *arguments)
        return done.exit_code, {finding["check"]: finding for finding in json.loads(done.stdout)}

    _, found = findings("--model", str(DEMO_MODEL), "--port", "0")
    assert {"python", "torch", "disk", "port", "open files", "model", "tokenizer"} <= set(found)
    assert (found["model"]["result"], found["CPU kernels"]["result"]) == ("ok", "ok")
    formats = [found[f"weights in {weights}"] for weights in ("bf16", "int8", "int4")]
    assert all("0.00 GiB; below " in each["detail"] for each in formats)
    hints = " ".join(each["hint"] or "" for each in formats)
    assert (hints.count("one or two users"), hints.count("many users"), "--weights" in hints) == (
        1,
        1,
        True,
    )
    status, found = findings("--model", str(tmp_path), "--port", "99999")
    assert (status, found["model"]["result"]) == (1, "fail")
    assert (found["port"]["result"], "1 to 65535" in found["port"]["hint"]) == ("fail", True)
    monkeypatch.setenv("CXX", "no-such-compiler")
    status, found = findings("--port", "0")
    assert (status, found["CPU kernels"]["result"]) == (0, "warn")
    assert "CXX=no-such-compiler is no program" in found["CPU kernels"]["detail"]


@pytest.mark.parametrize(
    ("level", "result", "said"),
    [
        (
            "aarch64-i8mm",
            "warn",
            "; no such CPU ran these so far, and an emulator only some of them -> compare some answers",
        ),
        ("x86-64-v4-vnni", "ok", "; this CPU multiplies bfloat16 more slowly than float32"),
    ],
)
def test_the_doctor_says_which_kernels_are_not_the_usual_ones(
    level: str, result: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(library, "level_of", lambda _: level)
    monkeypatch.setattr(compilation, "cpu_features", lambda: BF16)
    done = run("doctor", "--data-dir", str(tmp_path), "--port", "0")
    (line,) = [each for each in done.stdout.splitlines() if "CPU kernels:" in each]
    assert line.startswith(result)
    assert said in line


def test_a_new_key_is_printed_whole_on_a_narrow_terminal(recorder: Recorder) -> None:
    secret = "manylora_0123456789ab_" + "x" * 60
    recorder.body = {
        "object": "key",
        "id": "key_1",
        "tenant": "acme",
        "scopes": ["infer"],
        "key": secret,
    }
    lines = run("key", "create", "acme", "--url", recorder.url, COLUMNS="40").output.splitlines()
    assert any(line.split() == ["key", secret] for line in lines)


def test_the_table_of_usage_has_words_for_what_has_no_name_and_days_of_the_zone(
    recorder: Recorder,
) -> None:
    start = "2026-11-21T23:00:00.000Z"
    named = [
        ("acme", "support", False),
        ("acme", None, False),
        (None, None, False),
        (None, None, True),
    ]
    rows = [
        {"start": start, "tenant": tenant, "adapter": name, "other": other, **SUMS}
        for tenant, name, other in named
    ]
    recorder.body = {"object": "list", "data": rows, "next": None, "totals": SUMS}
    asked = (
        "usage",
        "--bucket",
        "1d",
        "--tz",
        "Europe/Berlin",
        "--top",
        "3",
        "--url",
        recorder.url,
    )
    table = [line.split()[:3] for line in run(*asked).output.splitlines()[1:-1]]
    day = "2026-11-22T00:00+01:00"
    names = [("acme", "support"), ("acme", "(base)"), ("(admin)", "(base)"), ("(other)", "(other)")]
    assert table == [[day, *name] for name in names]
    assert json.loads(run(*asked, "--json").output)["data"] == rows


def test_usage_of_many_pages_is_one_table(recorder: Recorder) -> None:
    pages = [
        {"object": "list", "data": [{"tenant": name}], "next": after, "totals": SUMS}
        for name, after in (("a", "n"), ("b", "n"), ("c", None))
    ]
    recorder.pages = pages.copy()
    table = run("usage", "--by", "tenant", "--url", recorder.url).output.splitlines()
    assert [line.split()[0] for line in table] == ["TENANT", "a", "b", "c", "total"]
    assert [path.partition("after=")[2] for _, path, _, _ in recorder.calls] == ["", "n", "n"]
    recorder.pages = pages.copy()
    whole = json.loads(run("usage", "--json", "--url", recorder.url).output)
    assert (len(whole["data"]), whole["next"]) == (3, None)
    recorder.headers = {"content-type": "text/csv; charset=utf-8"}
    recorder.pages = ["tenant,requests\r\na,1\r\n", "tenant,requests\r\nb,2\r\n"]
    shown = run("usage", "--csv", "--status", "stop", "--url", recorder.url).output
    assert shown == "tenant,requests\na,1\nb,2\n"
    assert "status=stop" in recorder.calls[-1][1]
    assert "format=csv&after=n" in recorder.calls[-1][1]
    recorder.status, recorder.body = (
        400,
        {"error": {"message": "No such time.", "code": "invalid_value"}},
    )
    refused = run("usage", "--csv", "--url", recorder.url)
    assert (refused.exit_code, refused.stdout) == (2, "")


def test_whoami_shows_the_tenants_id_and_what_is_used_of_the_limits(recorder: Recorder) -> None:
    recorder.body = {
        "object": "me",
        "role": "tenant",
        "tenant": {"id": "ten_1", "name": "acme"},
        "key": {"id": "key_1", "name": "site", "scopes": ["infer"], "expires_at": None},
        "limits": {"tenant": {"adapters": 3}, "key": {}},
        "used": {"tenant": {"adapters": 1, "tokens_per_month": 9}, "key": {"tokens_per_month": 7}},
    }
    lines = [line.split() for line in run("whoami", "--url", recorder.url).output.splitlines()]
    assert ["tenant_id", "ten_1"] in lines
    assert lines[-3:] == [
        ["tenant", "adapters", "1", "3"],
        ["tenant", "tokens_per_month", "9", "-"],
        ["key", "tokens_per_month", "7", "-"],
    ]
    recorder.body = {
        "object": "me",
        "role": "admin",
        "tenant": None,
        "key": None,
        "limits": {},
        "used": {"tenant": {}},
    }
    assert run("whoami", "--url", recorder.url).output.splitlines()[0].split() == ["role", "admin"]


def test_splits_and_limits_are_shown_as_the_commands_take_them(recorder: Recorder) -> None:
    recorder.body = {
        "object": "adapter",
        "name": "a",
        "aliases": {"default": {"1": 95, "2": 5}, "b": 2},
    }
    shown = run("adapter", "alias", "a", "b=2", "--url", recorder.url).output
    assert "default=1:95,2:5 b=2" in shown
    details: tuple[tuple[dict[str, Any], str], ...] = (
        ({"limits": {"adapters": None, "stored_bytes": 9}}, "limits=adapters:none,stored_bytes:9"),
        (
            {"aliases": {"default": {"1": 95, "2": 5}, "b": None}},
            "aliases=default:(1:95,2:5),b:none",
        ),
        (
            {"digest": "sha256:0", "activate": True, "scopes": ["infer"]},
            "digest=sha256:0 activate=yes scopes=infer",
        ),
        ({}, "-"),
    )
    recorder.body = {
        "object": "list",
        "data": [{"action": "x", "detail": detail} for detail, _ in details],
    }
    lines = run("audit", "--url", recorder.url).output.splitlines()[1:]
    assert all(
        line.endswith(f"  {text}") for line, (_, text) in zip(lines, details, strict=True)
    ), lines


@pytest.mark.slow  # PostgreSQL is started
def test_db_upgrade_says_what_it_did_for_each_kind_of_database(tmp_path: Path) -> None:
    folder = ["db", "upgrade", "--data-dir", str(tmp_path / "data")]
    assert run(*folder).output == f"schema none -> {NEWEST}\n"
    assert run(*folder).output == f"schema {NEWEST}: up to date\n"
    url = fresh_database()
    assert (
        run("db", "upgrade", MANYLORA_REGISTRY__DATABASE_URL=url).output
        == f"schema none -> {NEWEST}\n"
    )
    unused = tmp_path / "unused"
    again = run("db", "upgrade", "--database-url", url, "--data-dir", str(unused))
    assert (again.output, unused.exists()) == (f"schema {NEWEST}: up to date\n", False)
    assert run("db", "upgrade", "--database-url", "mysql://h/d").exit_code == 2


@pytest.mark.parametrize("role", ["gateway", "replica"])
@pytest.mark.parametrize("missing", ["MANYLORA_PEPPER", "MANYLORA_ADMIN_KEY"])
def test_servers_of_a_cluster_do_not_start_with_secrets_of_their_own(
    tmp_path: Path, role: str, missing: str
) -> None:
    secrets = {"MANYLORA_PEPPER": "p" * 16, "MANYLORA_ADMIN_KEY": "k" * 16}
    environ = {
        **environment(),
        **{name: value for name, value in secrets.items() if name != missing},
    }
    command = [sys.executable, "-P", "-m", "manylora.cli", "serve", "--role", role, "--port", "0"]
    command += [
        "--data-dir",
        str(tmp_path),
        *(["--model", str(DEMO_MODEL)] if role == "replica" else []),
    ]
    found = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=240)
    assert found.returncode == 2
    assert f"A {role} needs {missing}" in found.stdout + found.stderr
    assert not {value for value in secrets.values() if value in found.stdout + found.stderr}
    assert not (tmp_path / "admin.key").exists() or missing == "MANYLORA_ADMIN_KEY"


def test_an_unknown_role_is_refused(tmp_path: Path) -> None:
    found = run("serve", "--role", "both", "--data-dir", str(tmp_path))
    assert found.exit_code == 2
    assert "server.role" in found.output
