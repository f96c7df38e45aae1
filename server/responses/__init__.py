"""OpenAI's Responses API, without a store: the same generation as a chat, in other words."""

from dataclasses import replace

from manylora.server.http import sse
from manylora.server.http.route_facts import OPENAI, JsonBody, RouteFacts, declare


def _event(body: JsonBody) -> bytes:
    return sse.event({**body["error"], "type": "error", "sequence_number": 0}, "error")


RESPONSES = declare(
    RouteFacts(
        path="/v1/responses",
        generates=True,
        is_for_all_replicas=False,
        in_batches=True,
        errors=replace(OPENAI, event=_event),
    )
)
