"""Answers of a Manylora server, and the errors for all others."""

from __future__ import annotations

import json
from typing import Any, TypeVar

import httpx

from manylora.errors import ClientError

Json = dict[str, Any]
FieldT = TypeVar("FieldT")


def json_object(url: str, text: str | bytes) -> Json:
    """Parse the JSON object that the server at `url` sent."""
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise not_manylora(url)
    return body


def field(url: str, body: object, name: str, kind: type[FieldT]) -> FieldT:
    """Take a field that every Manylora server sends."""
    value = body.get(name) if isinstance(body, dict) else None
    if not isinstance(value, kind):
        raise not_manylora(url)
    return value


def refusal(answer: httpx.Response, key: str | None) -> ClientError:
    """Make the error for a failed answer whose body was read. `key` is the key that was sent."""
    status = answer.status_code
    wait = answer.headers.get("retry-after", "")
    wait_s = float(wait) if wait.isascii() and wait.isdigit() else None  # a date is ignored
    hint = "Set key= or MANYLORA_KEY." if status == httpx.codes.UNAUTHORIZED and not key else ""
    try:
        error = answer.json()["error"]
        message = str(error["message"])
        code = str(error["code"] or "not_manylora")
        param = error.get("param")
        findings = list(error.get("findings") or ())
        if findings:
            hint = findings[0]["hint"]
            message = message.removesuffix(hint).rstrip()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        message = f"The server at {answer.url} answered {status}."
        code = "not_manylora"
        param = None
        findings = []
        hint = "Is it Manylora? Set url= or MANYLORA_URL."
        if answer.has_redirect_location:
            message = f"{message} It names another address: {answer.headers['location']}."
            hint = "Use this address: set url= or MANYLORA_URL."
    return ClientError(
        message,
        code=code,
        param=param,
        hint=hint,
        status=status,
        findings=findings,
        retry_after_s=wait_s,
    )


def unreachable(url: str, error: Exception) -> ClientError:
    """Make the error for a server that does not answer, or whose certificate is not trusted."""
    message = f"Cannot reach {url}: {str(error).rstrip('.') or type(error).__name__}."
    code = "unreachable"
    hint = "Is `manylora serve` running there? Set url= or MANYLORA_URL."
    if "CERTIFICATE_VERIFY_FAILED" in message:
        code = "untrusted_certificate"
        hint = "Check the address. For an authority of your own, set SSL_CERT_FILE."
    return ClientError(message, code=code, hint=hint)


def not_manylora(url: str) -> ClientError:
    """Make the error for a server whose answer is not one of Manylora."""
    return ClientError(
        f"What answers at {url} is no Manylora server.",
        code="not_manylora",
        hint="Set url= or MANYLORA_URL.",
    )
