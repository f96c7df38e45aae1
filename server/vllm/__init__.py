"""Routes of vLLM by which trainers and evaluations steer a server: pause, resume, reset the cache, facts."""

from dataclasses import replace

from manylora.server.http.route_facts import OPENAI, RouteFacts, declare

PAUSE = declare(
    RouteFacts(
        path="/pause",
        generates=False,
        is_for_all_replicas=True,
        in_batches=False,
        errors=OPENAI,
    )
)
RESUME = declare(replace(PAUSE, path="/resume"))
RESET_PREFIX_CACHE = declare(replace(PAUSE, path="/reset_prefix_cache"))
