"""Anthropic's Messages API: the same generation as a chat, in other words."""

from manylora.server.http.route_facts import RouteFacts, declare
from manylora.server.messages.errors import ANTHROPIC

MESSAGES = declare(
    RouteFacts(
        path="/v1/messages",
        generates=True,
        is_for_all_replicas=False,
        in_batches=False,
        errors=ANTHROPIC,
    )
)
