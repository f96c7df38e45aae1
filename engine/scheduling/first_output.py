"""Facts of one request that only its first output tells, and the log-probabilities of its prompt."""

from __future__ import annotations

from dataclasses import dataclass, field

from manylora.engine.request import AdapterState, RequestOutput, TokenLogprobs


@dataclass(slots=True, kw_only=True, eq=False)
class FirstOutput:
    """Collects the facts until the first output is sent."""

    adapter_state: AdapterState
    """State of the adapter on arrival."""
    keeps_prompt_logprobs: bool
    """True while log-probabilities of the prompt are to be sent: then every token of it is to be computed."""
    queue_s: float | None = None
    """Seconds from arrival to the first step."""
    num_cached: int = field(default=0, init=False)
    """Prompt tokens that the request found in the prefix cache when it first started."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list, init=False)
    is_sent: bool = field(default=False, init=False)

    def take_prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        """Log-probabilities of the prompt, to be sent now; None where nobody asked for them, or they are sent."""
        if not self.keeps_prompt_logprobs:
            return None
        self.keeps_prompt_logprobs = False
        return [None, *self.prompt_logprobs]

    def mark(self, *outputs: RequestOutput) -> None:
        """Add the facts to the first output; from the second call on add nothing. *Mutates* the outputs."""
        if not self.is_sent:
            self.is_sent = True
            for output in outputs:
                output.adapter_state = self.adapter_state
                output.queue_s = self.queue_s
                output.cached_tokens = self.num_cached
