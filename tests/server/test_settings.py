from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from manylora.config import (
    GatewayConfig,
    MemoryConfig,
    SchedulerConfig,
    ServerConfig,
    TenantDefaults,
)
from manylora.errors import ConfigError
from manylora.registry.limits import TENANT_LIMITS
from manylora.server.settings import (
    as_tree,
    environment_name,
    load_config,
    parse_assignments,
    setting_names,
)

MODEL = {"model": {"path": "m"}}


def test_each_source_overrides_the_ones_below(tmp_path: Path) -> None:
    file = tmp_path / "manylora.yaml"
    file.write_text(
        "server:\n  port: 1\n  drain_s: 1\n  max_choices: 1\nmodel:\n  path: from-file\n"
    )
    environ = {
        "MANYLORA_SERVER__PORT": "2",
        "MANYLORA_SERVER__DRAIN_S": "2",
        "MANYLORA_CONFIG": str(file),
    }
    config = load_config({"server": {"port": 3, "host": None}}, environ)
    assert (config.server.port, config.server.drain_s, config.server.max_choices) == (3, 2.0, 1)
    assert config.server.host == "127.0.0.1"
    assert config.model.path == "from-file"


def test_a_file_on_the_command_line_wins_over_the_one_in_the_environment(tmp_path: Path) -> None:
    first, second = tmp_path / "1.yaml", tmp_path / "2.yaml"
    first.write_text("server: {port: 1}")
    second.write_text("server: {port: 2}")
    assert load_config(MODEL, {"MANYLORA_CONFIG": str(first)}, second).server.port == 2


@pytest.mark.parametrize("name", setting_names())
def test_every_setting_can_come_from_the_environment(name: str) -> None:
    section, field = name.split(".")
    default = as_tree(load_config(MODEL, {}))[section][field]
    value = "null" if default is None else str(default).lower()
    config = load_config(MODEL, {environment_name(name): value} if name != "model.path" else {})
    assert as_tree(config)[section][field] == default


@pytest.mark.parametrize(
    ("environ", "hint"),
    [
        ({"MANYLORA_SERVR__PORT": "1"}, "MANYLORA_SERVER__PORT"),
        ({"MANYLORA_SERVER_PORT": "1"}, "MANYLORA_SERVER__PORT"),
        ({"MANYLORA_PORT": "1"}, "MANYLORA_PORT"),
        ({"manylora_memory__gb": "1"}, "MANYLORA_MEMORY__GIB"),
    ],
)
def test_a_misspelt_variable_is_an_error_with_the_nearest_name(
    environ: dict[str, str], hint: str
) -> None:
    with pytest.raises(ConfigError, match=hint):
        load_config(MODEL, environ)


def test_other_variables_and_keys_are_left_alone() -> None:
    environ = {
        "PATH": "x",
        "MANYLORA_ADMIN_KEY": "k",
        "MANYLORA_URL": "u",
        "MANYLORA_KEY": "k",
        "MANYLORAY": "x",
    }
    assert load_config(MODEL, environ).model.path == "m"


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("servr: {port: 1}", "server"),
        ("server: {prt: 1}", "server.port"),
        ("server: 5", "mappings"),
        ("- a", "mappings"),
        ("a: [", "not YAML"),
        ("server: {port: many}", "server.port"),
        ("server: {port: 70000}", "0 to 65535"),
        ("memory: {kv_dtype: fp8}", r"memory\.kv_dtype: must be 'auto' or 'int8', got .fp8"),
    ],
)
def test_a_wrong_file_is_an_error_that_names_the_setting(
    tmp_path: Path, text: str, hint: str
) -> None:
    file = tmp_path / "manylora.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=hint):
        load_config(MODEL, {}, file)


def test_a_wrong_format_of_the_kv_cache_says_which_there_are() -> None:
    with pytest.raises(ConfigError, match=r"memory\.kv_dtype must be auto or int8, got 'fp8'"):
        MemoryConfig(kv_dtype="fp8")  # type: ignore[arg-type]


def test_a_missing_model_says_how_to_give_one() -> None:
    with pytest.raises(ConfigError, match="--model"):
        load_config({}, {})


def test_authentication_stays_on_where_others_can_connect() -> None:
    with pytest.raises(ConfigError, match="loopback"):
        load_config({**MODEL, "server": {"auth": "off", "host": "0.0.0.0"}}, {})
    assert load_config({**MODEL, "server": {"auth": "off"}}, {}).server.auth == "off"


def test_assignments_reach_any_setting() -> None:
    tree = parse_assignments(["memory.poison=true", "model.path=x=y", "server.port=9"])
    config = load_config(tree, {})
    assert (config.memory.poison, config.model.path, config.server.port) == (True, "x=y", 9)
    with pytest.raises(ConfigError, match=r"section\.name=value"):
        parse_assignments(["port=9"])


def test_a_database_password_is_never_shown() -> None:
    config = load_config(
        {**MODEL, "registry": {"database_url": "postgresql://me:hunter2@db/manylora"}}, {}
    )
    assert "hunter2" not in str(as_tree(config))
    assert config.registry.database_url == "postgresql://me:hunter2@db/manylora"


@pytest.mark.parametrize(
    ("url", "folder", "place"),
    [
        (None, "data/blobs", None),
        ("", "data/blobs", None),
        ("elsewhere/blobs", "elsewhere/blobs", None),
        ("./odd:name", "odd:name", None),
        ("/srv/blobs", "/srv/blobs", None),
        ("file:///srv/my%20blobs", "/srv/my blobs", None),
        ("s3://bucket", "data/blob-cache", ("bucket", "")),
        ("s3://bucket/", "data/blob-cache", ("bucket", "")),
        ("s3://my.bucket-1/teams/a_b/", "data/blob-cache", ("my.bucket-1", "teams/a_b")),
    ],
)
def test_blobs_lie_where_the_setting_says(
    url: str | None, folder: str, place: tuple[str, str] | None
) -> None:
    config = load_config(
        {**MODEL, "server": {"data_dir": "data"}, "registry": {"blob_url": url}}, {}
    )
    assert (config.blob_dir, config.registry.s3_place) == (Path(folder), place)


@pytest.mark.parametrize(
    "url",
    [
        "gs://bucket",
        "https://bucket.s3.amazonaws.com/",
        "s3:bucket",
        "s3://",
        "s3://b",
        "s3://Bucket",
        "s3:///prefix",
        "s3://bucket/a//b",
        "s3://bucket/../b",
        "s3://bucket?region=eu-west-1",
        "s3://AKIAKEY:hunter2@bucket",
        "file://host/folder",
        "file:folder",
    ],
)
def test_other_blob_urls_are_refused_with_what_to_write(url: str) -> None:
    with pytest.raises(
        ConfigError, match=r"a folder, file:///folder or s3://bucket\[/prefix\].*AWS_ACCESS_KEY_ID"
    ) as no:
        load_config({**MODEL, "registry": {"blob_url": url}}, {})
    assert "hunter2" not in str(no.value.message)


def test_the_defaults_of_tenants_are_limits_that_exist() -> None:
    assert tuple(field.name for field in dataclasses.fields(TenantDefaults)) == TENANT_LIMITS
    config = load_config({"model": {"path": "m"}}, {"MANYLORA_TENANT_DEFAULTS__ADAPTERS": "null"})
    assert config.tenant_defaults.adapters is None
    with pytest.raises(ConfigError, match=r"tenant_defaults\.adapters must be null or >= 0"):
        TenantDefaults(adapters=-1)


@pytest.mark.parametrize("seconds", [0, 0.05, 3601, float("nan")])
def test_the_longest_wait_has_bounds(seconds: float) -> None:
    with pytest.raises(ConfigError, match=r"scheduler\.max_wait_s"):
        SchedulerConfig(max_wait_s=seconds)


@pytest.mark.parametrize("num_tokens", [63, (1 << 20) + 1])
def test_a_step_holds_a_token_of_each_row(num_tokens: int) -> None:
    with pytest.raises(
        ConfigError,
        match=r"scheduler\.step_tokens must be from scheduler\.max_running \(64\) to 1048576",
    ):
        SchedulerConfig(step_tokens=num_tokens)


def test_a_gateway_needs_no_model_and_leaves_out_what_is_not_its_own(tmp_path: Path) -> None:
    file = tmp_path / "manylora.yaml"
    file.write_text("server: {role: gateway, port: 5}\nmodel: {path: m}\nmemory: {gib: -1}\n")
    config = load_config(
        {"registry": {"database_url": "postgresql://h/d"}}, {}, file, GatewayConfig
    )
    assert (config.server.role, config.server.port) == ("gateway", 5)
    assert config.registry.database_url == "postgresql://h/d"
    with pytest.raises(ConfigError, match=r"memory\.gib"):
        load_config({}, {}, file)


@pytest.mark.parametrize(
    "environ", [{"MANYLORA_SERVR__PORT": "1"}, {"MANYLORA_SERVER__ROLE": "replicas"}]
)
def test_a_gateway_refuses_misspelt_settings_too(environ: dict[str, str]) -> None:
    with pytest.raises(
        ConfigError,
        match=next(iter(environ.values())) if "replicas" in environ.values() else "SERVER",
    ):
        load_config({}, environ, None, GatewayConfig)


@pytest.mark.parametrize(
    ("url", "is_good"),
    [
        *(
            (each, True)
            for each in (
                "http://10.0.0.7:8000",
                "https://manylora-1.internal",
                "http://[fd00::1]:8000",
            )
        ),
        *(
            (each, True)
            for each in ("HTTP://Manylora_1:1", "http://[::ffff:10.0.0.7]", "http://h:65535")
        ),
        *(
            (each, False)
            for each in ("10.0.0.7:8000", "ftp://x", "http://", "http://x/path", "http://x y", "")
        ),
        *(
            (each, False)
            for each in ("http://user:secret@h", "http://secret@h:1", "http://h?x", "http://h#x")
        ),
        *(
            (each, False)
            for each in (
                "http://h:99999",
                "http://h:0",
                "http://h:",
                "http://h:x",
                "http://fd00::1:8000",
            )
        ),
        *(
            (each, False)
            for each in (
                "http://[::1",
                "http://[:::]",
                "http://[10.0.0.7]",
                "http://[h]",
                "http://h\n",
            )
        ),
        *((each, False) for each in ("http://0.0.0.0:80", "http://[::]:80", "http://[0::0]")),
    ],
)
def test_the_address_for_gateways_is_one(url: str, is_good: bool) -> None:
    if is_good:
        assert ServerConfig(advertised_url=url).advertised_url == url
    else:
        with pytest.raises(ConfigError, match="advertised_url") as refused:
            ServerConfig(advertised_url=url)
        assert "secret" not in str(refused.value)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_replica_that_listens_everywhere_must_say_where_it_is(host: str) -> None:
    with pytest.raises(
        ConfigError, match=r"server\.advertised_url must be set to this server's own address"
    ):
        ServerConfig(host=host, role="replica")
    assert ServerConfig(host=host, role="replica", advertised_url="http://h:1").host == host
    assert ServerConfig(host=host, role="gateway").advertised_url is None
