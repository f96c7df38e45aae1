from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytest

from api_adapters import upload
from api_server import BASE, Api
from manylora.errors import ConfigError
from manylora.registry.usage.prices import Price
from manylora.server.usage.price_file import read_prices

pytestmark = pytest.mark.anyio
DEFAULT = "{prompt: 0.2, cached: 0.05, completion: 0.6}"
FILE = f"""
currency: EUR
per_million_tokens:
  default: {DEFAULT}
  base: {{prompt: 1, cached: 0, completion: 0.0001}}
  acme/*: {{prompt: 3, cached: 3, completion: 3}}
  acme/support: {{prompt: 4, cached: 4, completion: 4}}
  acme/rival/support: {{prompt: 5, cached: 5, completion: 5}}
"""


def test_a_price_file_is_read_exactly(tmp_path: Path) -> None:
    (tmp_path / "prices.yaml").write_text(FILE)
    prices = read_prices(tmp_path / "prices.yaml")
    assert prices.currency == "EUR"
    assert prices.prices["default"] == Price(prompt=2000, cached=500, completion=6000)
    assert prices.prices["base"] == Price(prompt=10_000, cached=0, completion=1)
    names = {"default", "base", "acme/*", "acme/support", "acme/rival/support"}
    assert prices.prices.keys() == names


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("[", "not YAML"),
        ("currency: EUR", "per_million_tokens: is required"),
        (f"currency: 'E U'\nper_million_tokens: {{default: {DEFAULT}}}", "currency: "),
        ("currency: EUR\nper_million_tokens: {}", "must have default"),
        (
            f"currency: EUR\nper_million_tokens: {{default: {DEFAULT}, acme: {DEFAULT}}}",
            "TENANT/ADAPTER",
        ),
        (
            f"currency: EUR\nper_million_tokens: {{default: {DEFAULT}, a/B: {DEFAULT}}}",
            "TENANT/ADAPTER",
        ),
        (
            "currency: EUR\nper_million_tokens: {default: {prompt: 1}}",
            "default.cached: is required",
        ),
        (
            "currency: EUR\nper_million_tokens: {default: {prompt: 0.00001, cached: 0, completion: 0}}",
            "prompt: must be a number of at most 4 decimal places, got 1e-05",
        ),
        (
            "currency: EUR\nper_million_tokens: {default: {prompt: -1, cached: 0, completion: 0}}",
            "default.prompt",
        ),
        (
            "currency: EUR\nper_million_tokens: {default: {prompt: true, cached: 0, completion: 0}}",
            "default.prompt",
        ),
        (
            "currency: EUR\nper_million_tokens: {default: {prompt: .inf, cached: 0, completion: 0}}",
            "default.prompt",
        ),
        (
            "currency: EUR\nper_million_tokens: {default: {prompt: x, cached: 0, completion: 0}}",
            "default.prompt",
        ),
    ],
)
def test_a_wrong_price_file_is_refused_with_the_place(
    tmp_path: Path, content: str, told: str
) -> None:
    (tmp_path / "prices.yaml").write_text(content)
    with pytest.raises(ConfigError, match=told):
        read_prices(tmp_path / "prices.yaml")
    with pytest.raises(ConfigError, match="Cannot read the price file"):
        read_prices(tmp_path / "none.yaml")


async def test_usage_shows_its_cost_where_there_are_prices(api: Api, tmp_path: Path) -> None:
    await upload(await api.tenant("acme"), "support")
    base, adapted = await api.ask("rival"), await api.ask("acme", model="support")
    without = (await api.admin.get("/v1/usage?group_by=tenant")).json()
    assert "currency" not in without
    assert "cost" not in without["totals"]
    (tmp_path / "prices.yaml").write_text(FILE)
    api.services.registry.prices = read_prices(tmp_path / "prices.yaml")
    usage = (await api.admin.get("/v1/usage?group_by=tenant")).json()
    units = {
        "acme": 40_000 * (adapted["prompt_tokens"] + adapted["completion_tokens"]),
        "rival": 10_000 * base["prompt_tokens"] + base["completion_tokens"],
    }
    assert usage["currency"] == "EUR"
    assert {row["tenant"]: round(float(row["cost"]) * 10**10) for row in usage["data"]} == units
    assert round(float(usage["totals"]["cost"]) * 10**10) == sum(units.values())
    answer = await api.admin.get("/v1/usage?group_by=tenant&format=csv")
    assert answer.headers["content-type"].startswith("text/csv")
    rows = [
        (row["tenant"], row["completion_tokens"], row["cost"])
        for row in csv.DictReader(io.StringIO(answer.text))
    ]
    assert rows == [
        (row["tenant"], str(row["completion_tokens"]), row["cost"]) for row in usage["data"]
    ]


async def test_usage_is_filtered_grouped_by_status_and_listed_by_event(api: Api) -> None:
    await upload(await api.tenant("acme"), "support")
    for model, request_id in ((BASE, "a"), ("support", "b"), ("support", "c")):
        await api.ask("acme", {"x-request-id": request_id}, model=model)
    await api.ask("rival")
    acme = await api.tenant("acme")
    assert (await acme.get("/v1/usage?adapter=support")).json()["totals"]["requests"] == 2
    assert (await acme.get("/v1/usage?adapter=support&adapter=")).json()["totals"]["requests"] == 3
    assert (await acme.get("/v1/usage?version=1&status=aborted")).json()["totals"]["requests"] == 0
    by_status = (await acme.get("/v1/usage?group_by=status")).json()["data"]
    assert [(row["status"], row["requests"]) for row in by_status] == [("length", 2), ("stop", 1)]
    events = (await acme.get("/v1/usage/events")).json()
    assert [
        (event["request_id"], event["adapter"], event["version"], event["status"])
        for event in events["data"]
    ] == [
        ("a", None, None, "stop"),
        ("b", "support", 1, "length"),
        ("c", "support", 1, "length"),
    ]
    assert {event["tenant"] for event in events["data"]} == {"acme"}
    first = (await acme.get("/v1/usage/events?limit=2")).json()
    rest = (await acme.get("/v1/usage/events", params={"limit": 2, "after": first["next"]})).json()
    assert [*first["data"], *rest["data"]] == events["data"]
    assert rest["next"] is None
    assert len((await api.admin.get("/v1/usage/events")).json()["data"]) == 4
    sums = await acme.get("/v1/usage?group_by=key,status&bucket=1m&format=csv&limit=1")
    pages = (await acme.get("/v1/usage?group_by=key,status&bucket=1m&limit=1")).json()
    assert sums.headers["x-manylora-next"] == pages["next"]
    by_adapter: dict[str, Any] = {"group_by": "adapter", "format": "csv", "limit": "1"}
    one = await acme.get("/v1/usage", params=by_adapter)
    last = await acme.get(
        "/v1/usage", params={**by_adapter, "after": one.headers["x-manylora-next"]}
    )
    rows = [
        row["adapter"] for part in (one, last) for row in csv.DictReader(io.StringIO(part.text))
    ]
    assert (sorted(rows), "x-manylora-next" in last.headers) == (["", "support"], False)
    page = await acme.get("/v1/usage/events?format=csv&limit=2")
    assert page.headers["x-manylora-next"] == first["next"]
    assert [row["id"] for row in csv.DictReader(io.StringIO(page.text))] == [
        event["id"] for event in first["data"]
    ]
    assert (await acme.get("/v1/usage/events?bucket=1h")).status_code == 400


async def test_a_client_s_own_text_is_no_formula(api: Api) -> None:
    await api.ask("acme", {"x-request-id": "=1+2"})
    text = (await (await api.tenant("acme")).get("/v1/usage/events?format=csv")).text
    (row,) = csv.DictReader(io.StringIO(text))
    assert row["request_id"] == "'=1+2"
