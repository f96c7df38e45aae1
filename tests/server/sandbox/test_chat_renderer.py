"""Chat templates that are programs without an end, in the real processes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import psutil
import pytest
from transformers import AutoTokenizer

from fake_engine import demo_tokenizer
from manylora.engine.text.tokenizer import MAX_CHARACTERS
from manylora.errors import InvalidRequestError
from manylora.server.process.threads import Acting, acting
from manylora.server.sandbox.chat_renderer import ChatRenderer
from quick_renderer import QuickRenderer
from tool_models import tokenizer_folder, tokenizer_with

pytestmark = pytest.mark.anyio
CPU_S = 0.2
GREETING = [{"role": "user", "content": "Hi"}]
LAST = "{{ messages[-1].content }}"
BY_WORD = """
{%- set word = messages[-1].content %}
{%- set big = 10 ** 8 * (word | length) %}
{%- macro again(n) %}{{ again(n + 1) }}{% endmacro %}
{%- macro twice(n) %}{% if n %}{{ twice(n - 1) }}{{ twice(n - 1) }}{% endif %}{% endmacro %}
{%- if word == "loops" %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}
{%- elif word == "macros" %}{{ twice(60) }}
{%- elif word == "string" %}{{ "a" * big }}
{%- elif word == "center" %}{{ word | center(big) }}
{%- elif word == "list" %}{{ ([0] * big) | length }}
{%- elif word == "number" %}{{ 10 ** big }}
{%- elif word == "grows" %}{% set all = namespace(text="a") %}
  {%- for i in range(99) %}{% set all.text = all.text ~ all.text %}{% endfor %}
{%- elif word == "recursion" %}{{ again(0) }}
{%- elif word == "range" %}{% for i in range(big) %}{% endfor %}
{%- elif word == "format" %}{{ ("%" ~ big ~ "d") % 1 }}
{%- elif word == "zero" %}{{ 1 // (word | int) }}
{%- elif word == "class" %}{{ "".__class__.__mro__[1].__subclasses__() }}
{%- elif word == "own" %}{{ raise_exception("Roles must   alternate.\n" ~ "x" * 999) }}
{%- elif word == "output" %}{{ "a" * (2 ** 22 * (word | length)) }}
{%- else %}{{ word }}{% endif %}"""
OVER_A_LIMIT = ("loops", "macros", "string", "center", "list", "number", "grows", "format")
REFUSED = ("recursion", "range", "zero", "class")


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def renderer() -> AsyncIterator[ChatRenderer]:
    made = ChatRenderer(tokenizer_with(BY_WORD), CPU_S)
    yield made
    await made.close()


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


async def refusal(renderer: ChatRenderer, text: str) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as refused:
        await renderer.render(chat(text))
    return refused.value


@pytest.mark.parametrize("text", OVER_A_LIMIT)
async def test_what_takes_too_much_is_refused_and_the_next_chat_is_rendered(
    renderer: ChatRenderer, text: str
) -> None:
    error = await refusal(renderer, text)
    assert (error.code, error.param) == ("chat_template_unusable", "messages")
    assert "too much computing time or memory" in error.message
    assert await renderer.render(chat("hello")) == "hello"


@pytest.mark.parametrize("text", REFUSED)
async def test_what_fails_by_itself_is_refused_without_words_of_a_library(
    renderer: ChatRenderer, text: str
) -> None:
    error = await refusal(renderer, text)
    assert error.message == (
        "The model's chat template does not take these messages: check their roles, order and content."
    )
    assert await renderer.render(chat("hello")) == "hello"


async def test_a_refusal_of_the_template_is_told_in_its_own_words(renderer: ChatRenderer) -> None:
    error = await refusal(renderer, "own")
    assert error.message.endswith('It says: "Roles must alternate. ' + "x" * 278 + '"')


async def test_an_output_is_bounded(renderer: ChatRenderer) -> None:
    assert f"more than {MAX_CHARACTERS} characters" in (await refusal(renderer, "output")).message


async def test_a_slow_chat_of_one_tenant_delays_no_other(renderer: ChatRenderer) -> None:
    async def render(tenant: str, text: str) -> str:
        acting.set(Acting(tenant))
        return await renderer.render(chat(text))

    slow = [asyncio.create_task(render("slow", "loops")) for _ in range(30)]
    await asyncio.sleep(0)
    assert [await asyncio.create_task(render("quick", str(number))) for number in range(3)] == [
        "0",
        "1",
        "2",
    ]
    assert not slow[-1].done()
    for each in slow:
        each.cancel()
    await asyncio.gather(*slow, return_exceptions=True)
    assert await renderer.render(chat("hello")) == "hello"


async def test_a_process_that_is_killed_from_outside_is_replaced(renderer: ChatRenderer) -> None:
    assert await renderer.render(chat("hello")) == "hello"
    for fork in _forks():
        fork.kill()
        fork.wait()
    assert await renderer.render(chat("again")) == "again"
    for process in {fork.parent() for fork in _forks()} - {None}:
        process.kill()  # type: ignore[union-attr]
    assert await renderer.render(chat("again")) == "again"


async def test_the_processes_end_with_the_renderer() -> None:
    own = ChatRenderer(tokenizer_with(LAST + " "))
    before = set(_forks())
    await own.render(chat("hello"))
    started = set(_forks()) - before
    assert started
    await own.close()
    assert not psutil.wait_procs(list(started), timeout=20)[1]


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (r"{{ '\ud800' }}", "writes halves of characters"),
        ("{% for %}", "is not valid Jinja at line 1"),
        ("a\n{{ x", "is not valid Jinja at line 2"),
        ("{{ 10 ** (10 ** 10) }}", "takes too much computing"),
        ("{% if x %}" * 5000 + "{% endif %}" * 5000, "does not take these messages"),
    ],
)
async def test_a_template_that_cannot_be_used_is_found_at_the_start(
    template: str, reason: str
) -> None:
    own = (ChatRenderer if "10" in template else QuickRenderer)(tokenizer_with(template), CPU_S)
    fault = await own.try_template()
    assert fault is None if "messages" in reason else reason in (fault or "")
    with pytest.raises(InvalidRequestError, match=reason):
        await own.render(chat("hello"))
    await own.close()


@pytest.mark.parametrize("template", [None, LAST, "{{ raise_exception('No greetings.') }}"])
async def test_other_templates_are_no_fault(template: str | None) -> None:
    own = QuickRenderer(demo_tokenizer() if template is None else tokenizer_with(template))
    assert await own.try_template() is None


@pytest.mark.parametrize(
    "asked",
    [
        {"messages": [*GREETING, {"role": "assistant", "content": "é🎉\x00\n"}, *GREETING]},
        {
            "messages": [*GREETING, {"role": "assistant", "content": "So "}],
            "continue_final_message": True,
        },
        {
            "messages": [{"role": "user", "content": None, "reasoning": "r"}],
            "template_kwargs": {"x": [1, 1e300]},
        },
        {
            "messages": GREETING,
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        },
    ],
)
async def test_a_chat_is_rendered_as_transformers_does(asked: dict[str, Any]) -> None:
    template = "{{ messages | tojson }}{{ tools | tojson }}{{ x }}{{ bos_token }}{{ add_generation_prompt }}"
    own = QuickRenderer(tokenizer_with(template + "{# content #}{{ messages[-1].content }}"))
    options = {"add_generation_prompt": False, "continue_final_message": False, **asked}
    messages, variables = options.pop("messages"), options.pop("template_kwargs", {})
    reference = AutoTokenizer.from_pretrained(
        tokenizer_folder(template + "{# content #}{{ messages[-1].content }}")
    )
    expected = reference.apply_chat_template(messages, tokenize=False, **options, **variables)
    found = await own.render({"add_generation_prompt": False, **asked})
    assert found == expected


IMPORTS = """
import sys, types
from manylora.server.sandbox import chat_worker
class Bare(types.ModuleType):
    def __setattr__(self, name, value):
        if name == "__path__": value = ["/nowhere"]
        super().__setattr__(name, value)
if sys.argv[1] == "not enough":
    chat_worker.ModuleType = Bare
chat_worker.import_templates()
from transformers.utils import chat_template_utils
print(chat_template_utils.render_jinja_template([[]], chat_template="rendered")[0][0])
print("transformers.utils.hub" in sys.modules, sys.modules["torch"])
"""


@pytest.mark.parametrize(("packages", "is_whole"), [("enough", False), ("not enough", True)])
def test_a_process_imports_little_of_transformers_where_that_is_enough(
    packages: str, is_whole: bool
) -> None:
    command = [sys.executable, "-P", "-c", IMPORTS, packages]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["rendered", str(is_whole), "None"]


def _forks() -> list[psutil.Process]:
    children = [
        child
        for child in psutil.Process().children()
        if child.status() != psutil.STATUS_ZOMBIE and "chat_worker" in " ".join(child.cmdline())
    ]
    return [fork for child in children for fork in child.children()]
