"""Completions and chat: from a request's body to its answer and its usage event."""

from dataclasses import replace

from manylora.server.http.route_facts import OPENAI, RouteFacts, declare

COMPLETIONS = declare(
    RouteFacts(
        path="/v1/completions",
        generates=True,
        is_for_all_replicas=False,
        in_batches=True,
        errors=OPENAI,
    )
)
CHAT = declare(replace(COMPLETIONS, path="/v1/chat/completions"))
