"""The calls that `weft demo` makes to its server."""

from __future__ import annotations

from typing import Any

import httpx

from weft import demo
from weft.errors import WeftError


class DemoClient:
    """The calls of the demo.

    All raise `WeftError` when the server refuses, with its own words, or does not answer.

    Args:
        url: The server, without /v1.
    """

    def __init__(self, url: str) -> None:
        self._http = httpx.AsyncClient(base_url=url, timeout=60, trust_env=False)

    async def __aenter__(self) -> DemoClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def ensure_tenant(self, admin_key: str, name: str) -> None:
        """Make a tenant, or find it there."""
        await self.call("POST", "/v1/tenants", admin_key, accept=(201, 409), json={"name": name})

    async def new_key(self, admin_key: str, tenant: str) -> str:
        """The secret of a new key."""
        answer = await self.call("POST", f"/v1/tenants/{tenant}/keys", admin_key, json={"name": "demo"})
        return str(answer["key"])

    async def upload(self, key: str, name: str) -> dict[str, Any]:
        """Upload a shipped adapter; its body."""
        folder = demo.ADAPTERS / name
        files = {
            "config": (folder / "adapter_config.json").read_bytes(),
            "weights": (folder / "adapter_model.safetensors").read_bytes(),
        }
        return await self.call("POST", "/v1/adapters", key, data={"name": name}, files=files)

    async def ask(self, key: str, model: str, question: str, max_tokens: int) -> str:
        """What a model answers, greedily."""
        body = {
            "model": model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": max_tokens,
            "temperature": 0,
        }
        answer = await self.call("POST", "/v1/chat/completions", key, json=body)
        return str(answer["choices"][0]["message"]["content"])

    async def engine(self, admin_key: str) -> dict[str, Any]:
        """What the engine says of itself."""
        return await self.call("GET", "/v1/engine", admin_key)

    async def call(self, method: str, path: str, key: str, **content: Any) -> dict[str, Any]:  # noqa: ANN401 - for httpx
        """The JSON of an answer; the arguments are those of `answer`."""
        return dict((await self.answer(method, path, key, **content)).json())

    async def answer(
        self,
        method: str,
        path: str,
        key: str,
        accept: tuple[int, ...] = (200, 201),
        **content: Any,  # noqa: ANN401 - parameters and body as httpx takes them
    ) -> httpx.Response:
        """An answer of any type."""
        try:
            answer = await self._http.request(method, path, headers={"Authorization": f"Bearer {key}"}, **content)
        except httpx.TransportError as error:
            raise WeftError(f"{method} {path}: the server does not answer ({error}).") from error
        if answer.status_code not in accept:
            raise WeftError(f"{method} {path} was answered {answer.status_code}: {answer.text}")
        return answer
