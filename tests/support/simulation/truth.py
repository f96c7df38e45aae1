"""Right keys and tokens of each request: the model is a hash of tenant, adapter and all tokens so far."""

from __future__ import annotations

from manylora.engine.request import GenerationRequest

VOCAB_SIZE = 96
EOS = 0
MAX_MODEL_LEN = 120


def start_of(request: GenerationRequest) -> int:
    """Hash that keys and values begin with. Tenants count: no page may cross from one to another."""
    digest = request.adapter.digest if request.adapter is not None else "sha256:0"
    return hash((int(request.flow.tenant[1:]), int(digest[7:23], 16)))


def next_token(keys: int, choice_index: int) -> int:
    """The token after a position, by what its page holds."""
    return hash((keys, choice_index, 1)) % VOCAB_SIZE


class Truth:
    """One request, as it must go."""

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.tokens = list(request.prompt_token_ids)
        self.keys: list[int] = []
        """Key for each position: a hash of the start and all tokens up to it."""
        last = start_of(request)
        for token in self.tokens:
            last = hash((last, token))
            self.keys.append(last)
        for _ in range(request.params.max_tokens):
            token = next_token(self.keys[-1], request.choice_index)
            self.tokens.append(token)
            if token == EOS and not request.params.ignore_eos:
                break
            self.keys.append(hash((self.keys[-1], token)))

    @property
    def output(self) -> list[int]:
        """The tokens to come."""
        return self.tokens[len(self.request.prompt_token_ids) :]
