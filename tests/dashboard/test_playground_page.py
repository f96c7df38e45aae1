"""The playground: several models answer side by side, and what is shown of them is what the ledger has."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, Request, Response, expect

from browser import Watch, sign_in, watched_page
from idleness import wait_until
from long_model import LONG_ANSWER, long_model
from manylora.config import environment
from manylora_server import (
    ADMIN_KEY,
    DEMO_ADAPTERS,
    ManyloraServer,
    expected_answers,
    manylora_server,
)

QUESTION, FOLLOW_UP = (one["question"] for one in expected_answers()["questions"][:2])
ANSWERS = expected_answers()["questions"][0]["answers"]
FOUR = ("manylora-demo", "pirate", "shout", "json")


def address(*models: str, more: str = "") -> str:
    return "/playground?" + "&".join(
        [*(f"model={model}" for model in models), *([more] if more else [])]
    )


def column(page: Page, model: str) -> Locator:
    return page.locator(f'.talk[data-model="{model}"]')


def ask(page: Page, prompt: str) -> None:
    page.get_by_label("Prompt", exact=True).fill(prompt)
    page.keyboard.press("Control+Enter")


def answered(page: Page, model: str, text: str | None = None, nth: int = 0) -> Locator:
    """The exchange with this model, once it is over."""
    exchange = column(page, model).locator(".exchange").nth(nth)
    expect(exchange).to_have_attribute("data-state", "done")
    if text is not None:
        expect(exchange.locator("[data-answer]")).to_have_text(text)
    return exchange


def figure(exchange: Locator, name: str) -> int:
    return int(exchange.locator(f'[data-figure="{name}"]').get_attribute("data-value") or -1)


def last_event(server: ManyloraServer, adapter: str, tenant: str = "harbour") -> dict[str, Any]:
    params: dict[str, str | int] = {"tenant": tenant, "adapter": adapter, "limit": 10_000}
    return dict(server.admin.get("/v1/usage/events", params=params).json()["data"][-1])


def code(page: Page, model: str, language: str) -> str:
    page.get_by_role("button", name=f"Call {model} from code").click()
    page.get_by_role("button", name=language).click()
    text = page.get_by_role("dialog").locator("pre").inner_text()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    return text


def run(command: list[str], server: ManyloraServer, key: str) -> str:
    done = subprocess.run(
        command,
        env={**environment(), "MANYLORA_KEY": key, "no_proxy": "*"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def sent(request: Request) -> dict[str, Any]:
    return dict(request.post_data_json or {})


def test_the_base_and_its_adapters_answer_each_in_their_way(
    page: Page, server: ManyloraServer
) -> None:
    sign_in(page, server.tenants["harbour"], address(*FOUR))
    ask(page, QUESTION)
    for model in FOUR:
        exchange = answered(page, model, ANSWERS["base" if model == "manylora-demo" else model])
        by = "base" if model == "manylora-demo" else f"harbour/{model}@1"
        expect(exchange.locator('[data-figure="adapter"]')).to_have_text(by)
        event = last_event(server, "" if model == "manylora-demo" else model)
        shown = [figure(exchange, name) for name in ("in", "cached", "out")]
        assert shown == [
            event[name] for name in ("prompt_tokens", "cached_tokens", "completion_tokens")
        ]
        assert event["status"] == "stop"
        if model != "manylora-demo":
            state = exchange.locator('[data-figure="residency"]').get_attribute("data-state")
            assert state == event["adapter_state"]
        expect(exchange.locator('[data-figure="ttft"]')).to_have_text(re.compile(r"^[\d.]+ m?s$"))


def test_a_conversation_goes_on_until_it_is_cleared(page: Page, server: ManyloraServer) -> None:
    bodies: list[dict[str, Any]] = []
    page.on("request", lambda request: bodies.append(sent(request)))
    sign_in(page, server.tenants["harbour"], address("shout", "pirate", more="system=Be+kind."))
    ask(page, QUESTION)
    answered(page, "shout", ANSWERS["shout"])
    answered(page, "pirate")
    ask(page, FOLLOW_UP)
    answered(page, "shout", nth=1)
    answered(page, "pirate", nth=1)
    last = [body for body in bodies if body.get("model") == "shout"][-1]
    assert last["messages"] == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": ANSWERS["shout"]},
        {"role": "user", "content": FOLLOW_UP},
    ]
    page.get_by_role("button", name="Clear shout").click()
    expect(column(page, "shout").locator(".exchange")).to_have_count(0)
    expect(column(page, "pirate").locator(".exchange")).to_have_count(2)
    page.get_by_role("button", name="Send to all").click()
    answered(page, "shout")
    last = [body for body in bodies if body.get("model") == "shout"][-1]
    assert [message["role"] for message in last["messages"]] == ["system", "user"]


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManyloraServer]:
    """A server whose answers are as long as a test wants."""
    folder = tmp_path_factory.mktemp("endless")
    options = ("--dtype", "float32", "--memory-gib", "0.25")
    with manylora_server(folder, *options, model=long_model(folder / "long")) as running:
        for name in ("pirate", "shout"):
            assert (
                running.upload(running.tenant("harbour"), name, DEMO_ADAPTERS / name).status_code
                == 201
            )
        yield running


def event_of(server: ManyloraServer, response: Response) -> dict[str, Any]:
    """What the ledger has of this request, once it has it: it is recorded after the client has left."""

    def found() -> list[dict[str, Any]]:
        events = (
            server.tenant("harbour")
            .get("/v1/usage/events", params={"limit": 10_000})
            .json()["data"]
        )
        return [
            event for event in events if event["request_id"] == response.headers["x-request-id"]
        ]

    wait_until(found)
    return found()[0]


@pytest.mark.parametrize("button", ["Stop all", "Stop pirate"])
def test_a_stopped_answer_is_aborted_in_the_ledger(
    browser: Browser, endless: ManyloraServer, button: str
) -> None:
    with watched_page(browser, endless.url) as (page, _):
        sign_in(
            page,
            endless.tenants["harbour"],
            address("pirate", "shout", more=f"max_tokens={LONG_ANSWER}"),
        )
        endlessly = {"ignore_eos": True}  # the page has no field for it
        page.route(
            "**/v1/chat/completions",
            lambda route: route.continue_(post_data={**sent(route.request), **endlessly}),
        )
        with page.expect_response(
            lambda response: sent(response.request).get("model") == "pirate"
        ) as answering:
            ask(page, "Tell me everything")
        exchange = column(page, "pirate").locator(".exchange")
        expect(exchange.locator('[data-figure="out"]')).to_be_visible()
        page.get_by_role("button", name=button).click()
        expect(exchange).to_have_attribute("data-state", "stopped")
        expect(exchange).to_contain_text("stopped by you")
        event = event_of(endless, answering.value)
        assert event["status"] == "aborted"
        assert 0 < figure(exchange, "out") <= event["completion_tokens"] < LONG_ANSWER
        if button == "Stop pirate":
            expect(column(page, "shout").locator(".exchange")).to_have_attribute(
                "data-state", "coming"
            )
            page.get_by_role("button", name="Stop shout").click()
        expect(page.get_by_role("button", name="Clear all")).to_be_enabled()


def run_shown(page: Page, model: str, server: ManyloraServer, key: str, folder: Path) -> list[str]:
    """What the calls shown for this model answer, first by curl, then by Python."""
    curl = f'curl() {{ command curl -sS --fail-with-body "$@"; }}; {code(page, model, "curl")}'
    assert key not in curl
    script = folder / f"call_{model}.py"  # not json.py, which the script would import
    script.write_text(code(page, model, "Python (openai)"))
    by_curl = json.loads(run(["bash", "-c", curl], server, key))["choices"][0]["message"]["content"]
    return [by_curl.strip(), run([sys.executable, str(script)], server, key).strip()]


def test_the_shown_calls_run_and_answer_the_same(
    page: Page, server: ManyloraServer, tmp_path: Path
) -> None:
    sign_in(page, server.tenants["harbour"], address("pirate", "json", more="seed=3&max_tokens=40"))
    ask(page, "What's \"$HOME\"?\nIt's \\ mine, ça va")
    for model in ("pirate", "json"):
        text = answered(page, model).locator("[data-answer]").inner_text().strip()
        assert run_shown(page, model, server, server.tenants["harbour"], tmp_path) == [text, text]
        assert '"seed": 3' in code(page, model, "curl")


def test_an_admin_acts_for_the_chosen_tenant(
    page: Page, server: ManyloraServer, tmp_path: Path
) -> None:
    sign_in(page, ADMIN_KEY, "/playground?tenant=atelier")
    expect(page.locator(".talk")).to_have_count(3)
    assert {one.get_attribute("data-model") for one in page.locator(".talk").all()} == {
        "manylora-demo",
        "french",
        "haiku",
    }
    ask(page, QUESTION)
    answered(page, "french", ANSWERS["french"])
    assert last_event(server, "french", "atelier")["status"] == "stop"
    assert "?tenant=atelier" in code(page, "french", "curl")
    assert run_shown(page, "french", server, ADMIN_KEY, tmp_path) == [ANSWERS["french"]] * 2


def test_an_admin_of_all_tenants_names_them(page: Page) -> None:
    sign_in(page, ADMIN_KEY, address("atelier/haiku", "harbour/json"))
    options = page.locator("#models option")
    expect(options).to_have_count(6)
    names = {option.get_attribute("value") for option in options.all()}
    assert names == {
        "manylora-demo",
        *(f"atelier/{n}" for n in ("haiku", "french")),
        *(f"harbour/{n}" for n in FOUR[1:]),
    }
    ask(page, QUESTION)
    answered(page, "atelier/haiku", ANSWERS["haiku"])
    answered(page, "harbour/json", ANSWERS["json"])


def test_what_is_refused_is_said_in_its_column(
    watched: tuple[Page, Watch], server: ManyloraServer
) -> None:
    page, watch = watched
    watch.allowed = {404}
    sign_in(page, server.tenants["harbour"], address("pirat", "json"))
    ask(page, QUESTION)
    expect(column(page, "pirat").get_by_role("alert")).to_contain_text("Similar names: `pirate`.")
    answered(page, "json", ANSWERS["json"])
    name = page.get_by_label("Model 1")
    name.fill("pirate")
    name.press("Tab")
    expect(page).to_have_url(re.compile("model=pirate&model=json"))
    page.get_by_role("button", name="Send to all").click()
    answered(page, "pirate", ANSWERS["pirate"])


def test_the_address_keeps_all_choices(page: Page, server: ManyloraServer) -> None:
    sign_in(page, server.tenants["harbour"], "/playground")
    page.get_by_label("Prompt", exact=True).fill("Hello & welcome")
    page.get_by_label("Max tokens").fill("33")
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("Seed").fill("12")
    page.get_by_text("System prompt").click()
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_role("button", name="Add a model").click()
    expect(page.locator(".talk")).to_have_count(4)
    expect(page.get_by_role("button", name="Add a model")).to_be_disabled()
    page.get_by_role("button", name="Remove json").click()
    models = [one.get_attribute("data-model") for one in page.locator(".talk").all()]
    assert models == ["manylora-demo", "pirate", "shout"]
    page.reload()
    expect(page.locator(".talk")).to_have_count(3)
    assert [one.get_attribute("data-model") for one in page.locator(".talk").all()] == models
    for label, value in {
        "Max tokens": "33",
        "Temperature": "0.5",
        "Seed": "12",
        "System prompt": "Be brief.",
    }.items():
        expect(page.get_by_label(label)).to_have_value(value)
    expect(page.get_by_label("Prompt", exact=True)).to_have_value("Hello & welcome")
    page.go_back()
    expect(page.locator(".talk")).to_have_count(4)


def test_a_model_without_a_chat_template_is_asked_for_completions(
    watched: tuple[Page, Watch], server: ManyloraServer
) -> None:
    page, watch = watched
    watch.allowed = {400}
    error = {
        "message": "This model has no chat template.",
        "type": "x",
        "param": None,
        "code": "no_chat_template",
    }
    page.route(
        "**/v1/chat/completions", lambda route: route.fulfill(status=400, json={"error": error})
    )
    sign_in(page, server.tenants["harbour"], address("manylora-demo", more="max_tokens=8"))
    ask(page, "We are")
    expect(column(page, "manylora-demo").get_by_role("alert")).to_contain_text(
        "This model has no chat template."
    )
    page.get_by_role("button", name="Use completions instead").click()
    page.get_by_role("button", name="Send to all").click()
    assert answered(page, "manylora-demo", nth=1).locator("[data-answer]").inner_text()
    curl = code(page, "manylora-demo", "curl")
    assert '"text"' in run(["bash", "-c", curl], server, server.tenants["harbour"])
