"""From a validated body to prompts in token ids and sampling parameters. Knows the tokenizer, not the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from manylora.engine.grammar.json_schema import json_rule
from manylora.engine.request import Grammar
from manylora.engine.sampling_params import SamplingParams
from manylora.engine.text.text_stream import prompt_offsets
from manylora.engine.text.tokenizer import LONG, MAX_SWELLING, Tokenizer
from manylora.errors import ContextLengthError, InvalidRequestError
from manylora.server.core_services import CoreServices
from manylora.server.generation.chat_schemas import ChatBody, Message, ToolsBody
from manylora.server.generation.schemas import CompletionBody, GenerationBody
from manylora.server.generation.structured_output import WantedGrammar
from manylora.server.tools.call_grammar import CallGrammar
from manylora.server.tools.formats import REASONING_FIELDS, AnswerFormat, format_of
from manylora.server.tools.reading import AnswerPlan, plan_answer
from manylora.server.tools.schemas import ToolChoice, as_tools

LEAST_TOP_P = 1e-9
"""Stands for 0, which OpenAI takes: only the most likely token is left."""
MAX_TOKEN_CHARACTERS = 128
"""Longest token that is reckoned with where the tokenizer does not tell."""
_SAME = (
    "temperature",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "include_stop_str_in_output",
)
"""Fields that a body and `SamplingParams` have under one name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt."""

    token_ids: list[int]
    text: str | None = None
    """As the client sent it; None for token ids, chats and what was truncated."""
    text_offsets: Sequence[int] = ()
    """Characters of its text before each token, where they are asked for."""
    answer: AnswerPlan | None = None
    """Plan for reading answers that may hold calls or reasoning; None for plain text."""


@dataclass(slots=True, kw_only=True)
class Prompts:
    """The prompts of a body in order, and how all of them are continued."""

    prompts: list[Prompt]
    params: SamplingParams
    wanted: WantedGrammar | None
    """The grammar that answers are to be held to, before it is checked."""
    grammar: Grammar | None = None
    """The checked grammar."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(prompt.token_ids) for prompt in self.prompts)


def prompts_of(
    body: CompletionBody | ChatBody, services: CoreServices, rendered: str = ""
) -> Prompts:
    """The prompts of a body.

    Args:
        body: A completion, or a chat.
        services: The server's.
        rendered: A chat as the model reads it.

    Raises:
        InvalidRequestError: Too many prompts times candidates, an empty prompt, a token id beyond the vocabulary, or a
            sampling parameter out of range.
        ContextLengthError: A prompt and the requested tokens exceed the context.
    """
    if isinstance(body, ChatBody):
        return _chat(body, services, rendered)
    _check_candidates(body, len(body.prompt), services)
    echoed = body.logprobs if body.echo else None
    params = _params(
        body, services, max_tokens=body.max_tokens, logprobs=body.logprobs, echoed_logprobs=echoed
    )
    prompts = [_completion_prompt(given, body, services) for given in body.prompt]
    return Prompts(prompts=prompts, params=params, wanted=body.wanted_grammar())


def _completion_prompt(
    given: str | list[int], body: CompletionBody, services: CoreServices
) -> Prompt:
    if isinstance(given, str):
        check_text(given, services, is_truncated=body.truncate_prompt_tokens is not None)
        token_ids = services.tokenizer.encode(given, add_special_tokens=body.add_special_tokens)
        prompt = Prompt(token_ids=token_ids, text=given)
    else:
        prompt = Prompt(token_ids=given)
    prompt = _truncated(prompt, body.truncate_prompt_tokens, body.max_tokens, services)
    _check_prompt(prompt, body.max_tokens, services, "prompt")
    return (
        replace(prompt, text_offsets=_text_offsets(prompt, body, services)) if body.echo else prompt
    )


def _text_offsets(prompt: Prompt, body: CompletionBody, services: CoreServices) -> Sequence[int]:
    if body.logprobs is None:
        return ()
    if prompt.text is not None:
        return services.tokenizer.text_offsets(prompt.text, body.add_special_tokens)
    return prompt_offsets(
        services.tokenizer, prompt.token_ids, skip_special_tokens=body.skip_special_tokens
    )


def _truncated(
    prompt: Prompt, wanted: int | None, num_output: int, services: CoreServices
) -> Prompt:
    """The end of a prompt, which keeps `wanted` tokens; -1 leaves room for the output."""
    if wanted is None:
        return prompt
    room = services.ready.max_model_len - num_output
    _check_at_most(max(room, 1), wanted, "truncate_prompt_tokens")
    num_kept = max(room if wanted == -1 else wanted, 1)
    return (
        prompt
        if len(prompt.token_ids) <= num_kept
        else Prompt(token_ids=prompt.token_ids[-num_kept:])
    )


def _chat(body: ChatBody, services: CoreServices, rendered: str) -> Prompts:
    """Without a token limit the answer may fill the context."""
    answer = _answer_format(body, services)
    check_text(rendered, services, is_truncated=body.truncate_prompt_tokens is not None)
    token_ids = services.tokenizer.encode(rendered, add_special_tokens=body.add_special_tokens)
    prompt = _truncated(
        Prompt(token_ids=token_ids), body.truncate_prompt_tokens, body.token_limit or 1, services
    )
    wanted = body.wanted_grammar()
    if answer is not None:
        begun = rendered if any(body.template_options.values()) else ""
        plan = plan_answer(answer, body.offered, begun, shows_reasoning=body.include_reasoning)
        prompt = replace(prompt, answer=plan)
        wanted = _held_answer(body, plan, wanted, services)
    room = services.ready.max_model_len - len(prompt.token_ids)
    limit = body.token_limit or max(room, 1)
    if body.may_fill_context:
        limit = min(limit, max(room, 1))
    _check_prompt(prompt, limit, services, "messages")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = _params(body, services, max_tokens=limit, logprobs=logprobs)
    return Prompts(prompts=[prompt], params=params, wanted=wanted)


def chat_job(body: ChatBody, services: CoreServices) -> dict[str, Any]:
    """A chat as `ChatRenderer.render` takes it.

    Raises:
        InvalidRequestError: Too many candidates, or tools for a model whose calls are not known.
        ContextLengthError: A text is too long for the context.
    """
    _check_candidates(body, 1, services)
    _answer_format(body, services)
    for text in body.texts:
        check_text(text, services, is_truncated=True)  # the template may leave parts out
    return render_job(body, body.messages)


def render_job(body: ToolsBody, messages: list[Message]) -> dict[str, Any]:
    """The arguments of `ChatTemplate.render` for the messages of a body."""
    return {
        "messages": [as_turn(message) for message in messages],
        "tools": as_tools((tool.function for tool in body.shown_tools), "strict"),
        "template_kwargs": body.template_kwargs,
        **body.template_options,
    }


def _answer_format(body: ChatBody, services: CoreServices) -> AnswerFormat | None:
    """The format by which answers are read; None where they are plain text.

    Raises:
        InvalidRequestError: The chat has tools or calls, and Manylora does not know how the model writes them.
    """
    answer = format_of(services.tokenizer, services.config.model.tool_format)
    has_calls = bool(body.shown_tools) or any(
        message.tool_calls or message.tool_call_id for message in body.messages
    )
    if has_calls and not (answer and answer.has_calls):
        raise InvalidRequestError(
            "Manylora does not know how this model writes calls of tools. The operator may name the format "
            "by the setting model.tool_format, if it is one of docs/tools.md; else send the chat without tools.",
            code="tools_not_supported_by_model",
            param="tools" if body.shown_tools else "messages",
        )
    return answer if answer and (body.shown_tools or answer.has_reasoning) else None


def _held_answer(
    body: ChatBody, plan: AnswerPlan, wanted: WantedGrammar | None, services: CoreServices
) -> WantedGrammar | None:
    """The grammar of reasoning, then calls or an answer that is wanted; None for free text.

    Raises:
        InvalidRequestError: A tool's parameters are no schema that answers can be held to.
    """
    choice = body.tool_choice or ToolChoice(mode="auto")
    if plan.tools and plan.format.calls is None:
        is_held = choice.mode == "required" or not body.parallel_tool_calls or wanted is not None
        if is_held or any(tool.function.strict for tool in plan.tools):
            raise InvalidRequestError(
                "Manylora can read this model's calls, but not hold it to them: its response_template is its own. Send "
                "tool_choice auto, no strict and no response_format, or name its format by the setting "
                "model.tool_format.",
                code="tools_not_supported_by_model",
                param="tools",
            )
        return None
    if body.has_own_grammar or (wanted is None and not plan.tools):
        return wanted
    writer = CallGrammar(
        format=plan.format, special_tokens=services.tokenizer.grammar_tokens, json_rule=json_rule
    )
    whole = writer.lark(
        tools=plan.tools,
        choice=choice,
        is_parallel=body.parallel_tool_calls,
        thinks=plan.reader().thinks,
        answer=wanted.lark if wanted else None,
    )
    param = wanted.param if wanted and not plan.tools else "tools"
    return WantedGrammar(whole, param, [*(wanted.parts if wanted else ()), *writer.schemas])


def as_turn(message: Message) -> dict[str, Any]:
    """A message as chat templates expect it; `developer` is the newer name of `system`."""
    role = "system" if message.role == "developer" else message.role
    turn: dict[str, Any] = {"role": role, "content": message.content}
    if message.tool_calls:
        turn["tool_calls"] = [call.model_dump() for call in message.tool_calls]
    if message.role == "tool":
        turn["tool_call_id"] = message.tool_call_id
        if message.name is not None:
            turn["name"] = message.name
    reasoning = message.reasoning_content or message.reasoning
    return turn | dict.fromkeys(REASONING_FIELDS, reasoning) if reasoning else turn


def _params(
    body: GenerationBody,
    services: CoreServices,
    *,
    max_tokens: int,
    logprobs: int | None,
    echoed_logprobs: int | None = None,
) -> SamplingParams:
    stops = tuple(filter(None, body.stop))  # an empty one stops nothing
    server = services.config.server
    last_token = services.ready.vocab_size - 1
    asked = [number for number in (body.prompt_logprobs, echoed_logprobs) if number is not None]
    of_answer = "top_logprobs" if isinstance(body, ChatBody) else "logprobs"
    for limit, value, param, what in (
        (server.max_logprobs, body.prompt_logprobs, "prompt_logprobs", ""),
        (server.max_logprobs, logprobs, of_answer, ""),
        (last_token, max(body.allowed_token_ids, default=0), "allowed_token_ids", ""),
        (last_token, max(body.stop_token_ids, default=0), "stop_token_ids", ""),
        (last_token, max(body.logit_bias, default=0), "logit_bias", "The token ids of logit_bias"),
        (server.max_stops, len(stops), "stop", "The number of stop strings (server.max_stops)"),
    ):
        _check_at_most(limit, value or 0, param, what)
    if logprobs is None and body.num_candidates > body.n:
        logprobs = 0  # candidates are compared by them, whether they are shown or not
    return SamplingParams(
        max_tokens=max_tokens,
        top_p=max(body.top_p, LEAST_TOP_P),
        logprobs=logprobs,
        prompt_logprobs=max(asked, default=None),
        bad_words=bad_word_tokens(body.bad_words, services.tokenizer),
        allowed_token_ids=tuple(body.allowed_token_ids),
        stop=stops,
        stop_token_ids=tuple(body.stop_token_ids),
        **{name: getattr(body, name) for name in _SAME},
    )


def bad_word_tokens(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """The token sequences of words, as vLLM has them.

    A word with a space before it counts where it begins with another token then, and has no more of them.

    Raises:
        InvalidRequestError: A word has no tokens.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare, spaced = (
            tuple(tokenizer.encode(space + word.lstrip(), add_special_tokens=False))
            for space in ("", " ")
        )
        if not bare:
            raise InvalidRequestError(
                "Each of bad_words must have at least one token.", param="bad_words"
            )
        found[bare] = None
        if spaced and spaced[0] != bare[0] and len(spaced) == len(bare):
            found[spaced] = None
    return tuple(found)


def _check_candidates(body: GenerationBody, num_prompts: int, services: CoreServices) -> None:
    count = body.num_candidates
    limit = services.config.server.max_choices
    name = "n" if body.best_of is None else "best_of"
    param = name if count > limit else "prompt"
    what = f"The number of prompts times {name} (server.max_choices)"
    _check_at_most(limit, num_prompts * count, param, what)


def _check_at_most(limit: int, value: int, param: str, what: str = "") -> None:
    if value > limit:
        raise InvalidRequestError(
            f"{what or param} must be at most {limit}, got {value}.", param=param
        )


def _check_prompt(prompt: Prompt, num_output: int, services: CoreServices, param: str) -> None:
    """Refuse a prompt that has no tokens, unknown ones, or too many with those that are to follow."""
    num_prompt = len(prompt.token_ids)
    context = services.ready.max_model_len
    if not num_prompt:
        raise InvalidRequestError(
            "The prompt has no tokens; send at least one character.", param=param
        )
    last_token = services.ready.vocab_size - 1
    _check_at_most(last_token, max(prompt.token_ids), param, f"The token ids of {param}")
    total = num_prompt + num_output
    if total > context:
        parts = f"{num_prompt} in the {param}, {num_output} in the completion"
        raise _too_long(
            context, f"you requested {total} tokens ({parts}). Shorten one of them", param
        )


def check_text(text: str, services: CoreServices, *, is_truncated: bool = False) -> None:
    """Refuse what cannot fit, before tokenizing it.

    Args:
        text: What the client sent, or a rendered chat.
        services: The server's.
        is_truncated: True if the model may read only a part of it.

    Raises:
        ContextLengthError: It has more bytes than the tokens of a context can stand for.
        InvalidRequestError: It grows beyond measure when it is normalized.
    """
    context = services.ready.max_model_len
    if len(text) < LONG:  # too short to take long
        return
    most = None if is_truncated else services.tokenizer.max_token_bytes
    is_beyond = most is not None and len(text.encode("utf-8", "surrogatepass")) > most * context
    if is_beyond or len(text) > MAX_TOKEN_CHARACTERS * context:
        raise _too_long(context, f"a text has {len(text)} characters, which do not fit. Shorten it")
    if services.tokenizer.swells(text):
        raise InvalidRequestError(
            f"A text becomes more than {MAX_SWELLING} times as long when it is normalized."
        )


def _too_long(context: int, reason: str, param: str | None = None) -> ContextLengthError:
    """LiteLLM knows an overflow by the first words, and LangChain by the code where it stands in the message."""
    code = ContextLengthError.code
    message = (
        f"This model's maximum context length is {context} tokens. However, {reason} ({code})."
    )
    return ContextLengthError(message, param=param)
