"""The HTTP client of Manylora's own API: tenants, keys, adapters, grants, usage, status.

For text, use the openai package.

    client = manylora.Client("http://127.0.0.1:8000", key="manylora_...")
    client.push("out/my-adapter", name="support")

Answers are the JSON of the API as dicts and lists. `/openapi.json` of a server describes their fields.
"""

from __future__ import annotations

import time
import weakref
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from manylora.adapters.checkpoint.folder import CONFIG
from manylora.client.answers import Json, field, json_object, not_manylora, refusal, unreachable
from manylora.client.checkpoint import Progress, checkpoint_bytes, described, files_of, pieces
from manylora.config import environment, is_loopback
from manylora.errors import ClientError

DEFAULT_URL = "http://127.0.0.1:8000"
TIMEOUT_S = 600.0
PAUSES_S = (0, 1, 1, 2, 4, 8, 15, 30)
"""Seconds before each try to send a file."""
USAGE = ("/v1/usage", "/v1/usage/events")
"""Paths of the sums and of the events."""
LONGEST_WAIT_S = 60.0
"""Longest wait in seconds. If the server asks for a longer wait, a push does not try again."""
AGAIN = frozenset({408, 429, 503, "unreachable", "upload.busy", "upload.offset_mismatch"})
"""Statuses and codes after which a push tries again.

The codes of an upload mean that the server has not noticed yet that the last connection broke.
"""


class Client:
    """Client of one server, for any number of threads. `close` or the end of a `with` block closes its connections.

    Every method raises `ClientError` if the server refuses, cannot be reached, or is not Manylora.

    Args:
        url: Address of the server, with or without /v1; None takes `MANYLORA_URL`, else http://127.0.0.1:8000.
        key: API key; None takes `MANYLORA_KEY`.
        tenant: For an admin key: the tenant to act for.
        timeout_s: Longest wait for a connection, or for the server to take or send bytes, in seconds.
    """

    def __init__(
        self,
        url: str | None = None,
        key: str | None = None,
        tenant: str | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        variables = environment()
        self.url = (
            (url or variables.get("MANYLORA_URL") or DEFAULT_URL).rstrip("/").removesuffix("/v1")
        )
        self.key = key or variables.get("MANYLORA_KEY") or None
        self.tenant = tenant
        if self.key and not (self.key.isascii() and self.key.isprintable()):
            hint = "Pass it as it was shown, as key= or in MANYLORA_KEY."
            raise ClientError(
                "The API key must be printable ASCII.", code="invalid_api_key", hint=hint
            )
        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        try:
            is_far = not is_loopback(
                httpx.URL(self.url).host
            )  # a proxy of the environment does not lead to this machine
            self._http = httpx.Client(
                base_url=self.url, headers=headers, timeout=timeout_s, trust_env=is_far
            )
        except httpx.InvalidURL as error:
            raise unreachable(self.url, error) from error
        weakref.finalize(self, self._http.close)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def request(self, method: str, path: str, **content: Any) -> Json:  # noqa: ANN401 - as httpx takes it
        """Call a route without a method in this class.

        Args:
            method: HTTP method.
            path: Path of the route, with /v1. An address of another server is refused, because it would get the key.
            content: Arguments of httpx: `json`, `params`, `data`, `files`, `content`, `headers`. Parameters that are
                None are left out.

        Returns:
            The parsed body; empty if there is none.
        """
        answer = self._answer(method, path, **content)
        return (
            {}
            if answer.status_code == httpx.codes.NO_CONTENT
            else json_object(self.url, answer.content)
        )

    def me(self) -> Json:
        """Describe the key: role, tenant, scopes, limits and their use."""
        return self.request("GET", "/v1/me")

    def servers(self) -> Json | None:
        """List the gateways and replicas that a gateway knows; None for a single server. Needs the admin key."""
        try:
            return self.request("GET", "/v1/servers")
        except ClientError as error:
            if error.status == httpx.codes.NOT_FOUND and error.code != "not_manylora":
                return None
            raise

    def engine(self, server: str | None = None) -> Json:
        """Show the work and the memory of the engine. Needs the admin key.

        Args:
            server: Name of the replica, behind a gateway.
        """
        return self.request("GET", "/v1/engine", params={"server": server})

    def state(self, server: str | None = None) -> Json:
        """Show the servers behind a gateway, or the engine of a single server or of the replica that `server` names."""
        return (None if server else self.servers()) or self.engine(server)

    def audit(self, limit: int = 50) -> list[Json]:
        """List the last changes, newest first, of all tenants or of the client's `tenant`. Needs the admin key."""
        return field(
            self.url, self.request("GET", "/v1/audit", params={"limit": limit}), "data", list
        )

    def create_tenant(
        self, name: str, limits: Mapping[str, int | None] | None = None, weight: float | None = None
    ) -> Json:
        """Create a tenant. A limit that is not given has the server's default; None is no limit."""
        body = {"name": name, "limits": limits or {}}
        return self.request(
            "POST", "/v1/tenants", json=body if weight is None else {**body, "weight": weight}
        )

    def list_tenants(self) -> list[Json]:
        """List all tenants."""
        return self._list("/v1/tenants", limit=1000)

    def get_tenant(self, name: str) -> Json:
        """Show a tenant."""
        return self.request("GET", _path("tenants", name))

    def update_tenant(self, name: str, **fields: Any) -> Json:  # noqa: ANN401 - JSON
        """Change `weight`, or replace all `limits`."""
        return self.request("PATCH", _path("tenants", name), json=fields)

    def set_limits(self, name: str, limits: Mapping[str, int | None]) -> Json:
        """Set some of a tenant's limits, None for no limit. The others stay.

        This reads all limits and writes all of them. If two clients do it at the same time, one change may be lost.
        """
        return self.update_tenant(
            name, limits={**field(self.url, self.get_tenant(name), "limits", dict), **limits}
        )

    def delete_tenant(self, name: str) -> None:
        """Delete a tenant with its keys and adapters. Its usage stays."""
        self.request("DELETE", _path("tenants", name))

    def create_key(self, tenant: str, **fields: Any) -> Json:  # noqa: ANN401 - JSON
        """Create a key from `name`, `scopes`, `expires_at` and `limits`. Only this answer has its secret, in `key`."""
        return self.request("POST", _path("tenants", tenant, "keys"), json=fields)

    def list_keys(self, tenant: str) -> list[Json]:
        """List a tenant's keys."""
        return self._list(_path("tenants", tenant, "keys"))

    def rotate_key(self, key_id: str, grace_s: int = 0) -> Json:
        """Replace a key by a new one with the same rights. The old key works for `grace_s` more seconds."""
        return self.request("POST", _path("keys", key_id, "rotate"), json={"grace_s": grace_s})

    def revoke_key(self, key_id: str) -> None:
        """Make a key invalid at once."""
        self.request("DELETE", _path("keys", key_id))

    def push(
        self,
        path: str | Path,
        name: str | None = None,
        *,
        description: str | None = None,
        activate: bool = True,
        idempotency_key: str | None = None,
        progress: Progress | None = None,
    ) -> Json:
        """Upload an adapter, or its next version. A broken upload is continued, in this call or a later one.

        Args:
            path: Folder that PEFT or mlx-lm saved the adapter to, or a weights file with its config beside it.
            name: The adapter's name; None takes the folder's.
            description: Free text.
            activate: Let the plain name mean this version from now on.
            idempotency_key: A repeated push with the same key gets the answer of the first, for 24 hours.
            progress: Called as bytes are sent.

        Returns:
            The adapter, with `is_new`, which is true if its bytes are a new version.
        """
        files = files_of(Path(path))
        draft = {
            "name": name or files[CONFIG].resolve().parent.name,
            "description": description,
            "activate": activate,
        }
        announced = described(files)
        upload = None if idempotency_key else self._begun(draft, announced)
        if upload is None:
            headers = {"idempotency-key": idempotency_key} if idempotency_key else {}
            upload = self.request(
                "POST", "/v1/uploads", json={**draft, "files": announced}, headers=headers
            )
        place = _path("uploads", field(self.url, upload, "id", str))
        for each, file in files.items():
            self._patiently(self._send, place, each, file, progress or (lambda *_: None))
        return self._published(self._patiently(self._answer, "POST", f"{place}/complete"))

    def push_ephemeral(
        self,
        name: str,
        weights: bytes | str | Path | Mapping[str, Any],
        config: bytes | Mapping[str, Any] | Any = None,  # noqa: ANN401 - peft's LoraConfig
        *,
        keep: int | None = 4,
        ttl_s: int | None = None,
        activate: bool = True,
    ) -> Json:
        """Publish a version from a training script, in one request and in the server's memory only.

            client.push_ephemeral("policy", get_peft_model_state_dict(model), model.peft_config["default"])

        Running requests finish with their version, later requests get this one. It is lost when the server ends, so
        upload the last version with `push`.

        Args:
            name: The adapter's name.
            weights: Tensors by name, as PEFT returns them; or the bytes of adapter_model.safetensors; or a folder to
                which PEFT saved the adapter.
            config: PEFT's LoraConfig, its fields, or the bytes of adapter_config.json; None with a folder.
            keep: Number of ephemeral versions of the adapter that stay, with this one; None keeps all.
            ttl_s: Seconds after which it is withdrawn; None sets no time.
            activate: Let the plain name mean this version from now on.

        Returns:
            The adapter, with `is_new`, which is true if its bytes are a new version.
        """
        written, body = checkpoint_bytes(weights, config)
        headers = {
            "x-manylora-adapter-config": b64encode(written).decode(),
            "content-type": "application/octet-stream",
        }
        flags = {"ephemeral": True, "keep": keep, "ttl_s": ttl_s, "activate": activate}
        place = f"{_path('adapters', name)}/versions:push"
        return self._published(
            self._answer("PUT", place, content=body, headers=headers, params=flags)
        )

    def list_adapters(self) -> list[Json]:
        """List the tenant's adapters; with the admin key and no tenant, those of all tenants."""
        return self._list("/v1/adapters", limit=1000)

    def get_adapter(self, name: str) -> Json:
        """Show an adapter."""
        return self.request("GET", _path("adapters", name))

    def list_versions(self, name: str) -> list[Json]:
        """List an adapter's versions, newest first."""
        return self._list(_path("adapters", name, "versions"))

    def update_adapter(self, name: str, **fields: Any) -> Json:  # noqa: ANN401 - JSON
        """Change `description`, `pinned` (with `pinned_copies`) or `aliases` of an adapter.

        `aliases` maps an alias to a version; to weights of versions that share its requests, such as `{"1": 95,
        "2": 5}`; or to None, which deletes it. The name without @ means the alias `default`.
        """
        return self.request("PATCH", _path("adapters", name), json=fields)

    def delete_adapter(self, name: str, version: int | None = None) -> None:
        """Delete an adapter, or one version of it."""
        self.request("DELETE", _path("adapters", name), params={"version": version})

    def list_grants(self, name: str) -> list[Json]:
        """List the other tenants that may call an adapter."""
        return self._list(_path("adapters", name, "grants"))

    def grant(self, name: str, grantee: str, version: int | None = None) -> Json:
        """Let another tenant, given by its id, call an adapter as `tenant/name`. Admins may give its name instead."""
        body = {"tenant": grantee, "version": version}
        return self.request("POST", _path("adapters", name, "grants"), json=body)

    def withdraw_grant(self, name: str, grantee: str, version: int | None = None) -> None:
        """Take a grant back."""
        self.request(
            "DELETE", _path("adapters", name, "grants", grantee), params={"version": version}
        )

    def fit(self, adapters: Sequence[str] = (), ranks: Sequence[Mapping[str, Any]] = ()) -> Json:
        """Tell if adapters fit on the device at once, and how much KV cache is left then.

        Args:
            adapters: Names of uploaded adapters.
            ranks: Planned adapters, such as `{"rank": 16, "target_modules": "all-linear", "count": 10}`.
        """
        return self.request(
            "POST", "/v1/adapters:fit", json={"adapters": [*adapters], "ranks": [*ranks]}
        )

    def usage(self, *, events: bool = False, **filters: Any) -> Json:  # noqa: ANN401 - parameters of the route
        """Sum up usage, or list its events; the rows are in `data`.

        Args:
            events: List the events of the sums instead.
            filters: `start`, `end`, `adapter`, `status` and the others of `GET /v1/usage`; a list for several values.
                Sums also have `group_by`, `bucket`, `tz` and `top`.
        """
        pages = [*self._pages(USAGE[events], filters)]
        return {**pages[-1], "data": [row for page in pages for row in page["data"]]}

    def usage_csv(self, *, events: bool = False, **filters: Any) -> Iterator[str]:  # noqa: ANN401 - parameters
        """Yield the rows of `usage` as CSV, page by page. Only the first page has the header line."""
        after = None
        while True:
            params = {**filters, "format": "csv", "after": after}
            answer = self._answer("GET", USAGE[events], params=params)
            if not answer.headers.get("content-type", "").startswith("text/csv"):
                raise not_manylora(self.url)
            header, _, rows = answer.text.replace("\r\n", "\n").partition("\n")
            yield rows if after else f"{header}\n{rows}"
            if (after := answer.headers.get("x-manylora-next")) is None:
                return

    def _answer(self, method: str, path: str, **content: Any) -> httpx.Response:  # noqa: ANN401 - as httpx takes it
        if not path.startswith("/") or path.startswith("//"):
            raise ClientError(
                f"A path starts with one slash, such as /v1/me; got {path!r}.", code="invalid_path"
            )
        params = {"tenant": self.tenant, **content.pop("params", {})}
        given = {name: value for name, value in params.items() if value is not None}
        if self._http.is_closed:
            raise ClientError("This client is closed. Make a new one.", code="client_closed")
        try:
            answer = self._http.request(method, path, params=given, **content)
        except httpx.DecodingError as error:
            raise not_manylora(self.url) from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise unreachable(self.url, error) from error
        if not answer.is_success:
            raise refusal(answer, self.key)
        return answer

    def _list(self, path: str, **params: object) -> list[Json]:
        """Collect the rows of all pages of a list."""
        return [row for page in self._pages(path, params) for row in page["data"]]

    def _pages(self, path: str, params: Mapping[str, object]) -> Iterator[Json]:
        after = None
        while True:
            page = self.request("GET", path, params={**params, "after": after})
            yield {**page, "data": field(self.url, page, "data", list)}
            if (after := page.get("next")) is None:
                return

    def _begun(self, draft: Json, files: Json) -> Json | None:
        """Find the unfinished upload of the same files that an earlier push left."""
        wanted = {**draft, "state": "uploading"}
        for upload in self._list("/v1/uploads"):
            sent = field(self.url, upload, "files", dict)
            is_same = all(
                field(self.url, sent, name, dict).items() >= file.items()
                for name, file in files.items()
            )
            if is_same and upload.items() >= wanted.items():
                return upload
        return None

    def _send(self, place: str, name: str, file: Path, progress: Progress) -> None:
        """Send the part of a file that the server lacks. An ended upload takes no more bytes."""
        upload = self.request("GET", place)
        size = file.stat().st_size
        start = field(
            self.url,
            field(self.url, field(self.url, upload, "files", dict), name, dict),
            "received",
            int,
        )
        progress(file, start, size)
        if upload.get("state") == "uploading" and name in field(self.url, upload, "missing", list):
            headers = {
                "content-range": f"bytes {start}-{size - 1}/{size}",
                "content-length": str(size - start),
            }
            self.request(
                "PUT",
                f"{place}/files/{name}",
                content=pieces(file, start, size, progress),
                headers=headers,
            )

    def _published(self, answer: httpx.Response) -> Json:
        """Read the adapter from an answer, with `is_new`."""
        return {
            **json_object(self.url, answer.content),
            "is_new": answer.status_code == httpx.codes.CREATED,
        }

    def _patiently(self, call: Callable[..., Any], *arguments: object) -> Any:  # noqa: ANN401 - what the call returns
        """Repeat a call if the connection broke or the server is busy."""
        wait_s = 0.0
        for pause_s in PAUSES_S:
            time.sleep(max(pause_s, wait_s))
            try:
                return call(*arguments)
            except ClientError as error:
                wait_s = error.retry_after_s or 0.0
                if wait_s > LONGEST_WAIT_S or AGAIN.isdisjoint({error.status, error.code}):
                    raise
                last = error
        if last.code != "unreachable":
            raise last
        message = f"The connection broke {len(PAUSES_S)} times: {last.message}"
        raise ClientError(
            message, code="upload.interrupted", hint="Push again to continue this upload."
        ) from last


def _path(*parts: str) -> str:
    return "/".join(("/v1", *(quote(part, safe="") for part in parts)))
