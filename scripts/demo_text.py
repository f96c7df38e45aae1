"""The text that the demo model is trained on: its split by phrasing, the tokenizer, and batches of conversations."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from demo_shop import (
    BASE,
    NEUTRAL_SYSTEM_PROMPTS,
    STYLES,
    SYSTEM_PROMPTS,
    Exchange,
    exchanges,
    phrasings,
)
from demo_tools import ShopTalkSource, Talk, TalkSource, words
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 640
PAD, START, SYSTEM, USER, ASSISTANT, END = SPECIALS = (
    "<|pad|>",
    "<|start|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
)
TOOL_MARKS = (
    "<tools>",
    "</tools>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
"""One token each, and part of the text, as Qwen has them."""
CHAT_TEMPLATE = """{{ bos_token }}
{%- if tools %}
    {{- '<|system|>' }}
    {%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n' }}{% endif %}
    {{- '<tools>\\n' }}
    {%- for tool in tools %}
        {%- set function = tool.function or tool %}
        {%- set parameters = (function.parameters or {}).properties or {} %}
        {{- '{"name": ' + function.name | tojson + ', "parameters": ' + parameters | list | tojson + '}\\n' }}
    {%- endfor %}
    {{- '</tools><|end|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{ '<|user|>' }}{% else %}{{ '\\n' }}{% endif %}
        {{- '<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|end|>' }}{% endif %}
    {%- elif message.role == 'assistant' and message.tool_calls %}
        {{- '<|assistant|>' + (message.content or '') }}
        {%- for call in message.tool_calls %}
            {%- set function = call.function or call %}
            {%- if message.content or not loop.first %}{{ '\\n' }}{% endif %}
            {{- '<tool_call>\\n{"name": ' + function.name | tojson + ', "arguments": ' }}
            {{- function.arguments if function.arguments is string else function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|end|>' }}
    {%- elif message.role != 'system' or not tools or not loop.first %}
        {{- '<|' + message.role + '|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
"""Calls and results as Hermes and Qwen have them. Of a tool it shows only the names: the model reads nothing else."""
RESPONSE_TEMPLATE = {
    "start_anchor": ASSISTANT,
    "defaults": {"role": "assistant"},
    "fields": {
        "content": {"close": END, "repeats": True, "join": ""},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
    },
}
"""The template by which transformers and Manylora read an answer: text, and any number of calls."""
IGNORED = -100


@dataclass(frozen=True)
class Sample:
    """Token ids of a text and the ids that count in the loss."""

    ids: list[int]
    labels: list[int]


@dataclass(frozen=True)
class Corpus:
    """Question and answer pairs, split by phrasing."""

    train: list[Exchange]
    held_out: list[Exchange]


def make_corpus(seed: int) -> Corpus:
    """Hold out a tenth of the phrasings."""
    rng = random.Random(seed)
    train: list[Exchange] = []
    held_out: list[Exchange] = []
    for exchange in exchanges():
        for phrasing in phrasings(exchange):
            (held_out if rng.random() < 0.1 else train).append(phrasing)
    return Corpus(train, held_out)


def make_tokenizer(corpus: Corpus) -> PreTrainedTokenizerFast:
    """Byte-level BPE over the questions and the answers of every style.

    A digit, and a space before a word, are tokens of their own. A word then has the same tokens after a space as after
    a quote, and the model can copy it from a question into the arguments of a call.
    """
    texts = [exchange.question for exchange in corpus.train]
    texts += [exchange.answer(style) for exchange in exchanges() for style in (BASE, *STYLES)]
    texts += [*SYSTEM_PROMPTS.values(), *NEUTRAL_SYSTEM_PROMPTS] * 20
    texts += words()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" (?=[\p{L}\p{N}])"), "isolated"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(TOOL_MARKS),
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in TOOL_MARKS])
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{START} $A",
                pair=f"{START} $A {START} $B",
                special_tokens=[(START, SPECIALS.index(START))],
            ),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=START,
        eos_token=END,
        pad_token=PAD,
        extra_special_tokens=[SYSTEM, USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        response_template=RESPONSE_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )


class Sampler:
    """Draws conversations as token ids."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, pool: Sequence[Exchange], seed: int
    ) -> None:
        self._rng = random.Random(seed)
        self._tokenizer = tokenizer
        self._pool: dict[str, list[Exchange]] = {}
        for exchange in pool:
            self._pool.setdefault(exchange.topic.name, []).append(exchange)
        self._topics = list(self._pool)
        self._cache: dict[str, list[int]] = {}
        self._talks = TalkSource(self._rng, pool)
        self._shop_talks = ShopTalkSource(self._rng, pool)

    def pretraining(self) -> Sample:
        """Conversations with tools, plain chat, chat in a style under its system message, and bare sentences."""
        draw = self._rng.random()
        if draw < 0.05:
            text = self._exchange().answer(self._rng.choice((BASE, *STYLES)))
            ids = [self._id(START), *self._encode(text), self._id(END)]
            return Sample(ids, ids)
        if draw < 0.3:
            style = self._rng.choice(STYLES)
            return self._chat(style, SYSTEM_PROMPTS[style])
        if draw < 0.38:
            return talk_sample(self._tokenizer, self._talks.structured())
        if draw < 0.75:
            return talk_sample(self._tokenizer, self._talks.with_tools())
        return self._chat(BASE, self._neutral())

    def tuning(self) -> Sample:
        """Mostly conversations with the shop's own tools, and enough of the rest to keep it."""
        draw = self._rng.random()
        if draw < 0.6:
            return talk_sample(self._tokenizer, self._shop_talks.with_tools())
        if draw < 0.68:
            return talk_sample(self._tokenizer, self._shop_talks.structured())
        if draw < 0.8:
            style = self._rng.choice(STYLES)
            return self._chat(style, SYSTEM_PROMPTS[style])
        return self._chat(BASE, self._neutral())

    def styled(self, style: str) -> Sample:
        """Chat that answers in the style with no word about it in the prompt."""
        return self._chat(style, self._neutral())

    def _neutral(self) -> str | None:
        return self._rng.choice(NEUTRAL_SYSTEM_PROMPTS) if self._rng.random() < 0.25 else None

    def _exchange(self) -> Exchange:
        topic = self._rng.choice(self._topics)
        return self._rng.choice(self._pool[topic])

    def _chat(self, style: str, system: str | None) -> Sample:
        ids = [self._id(START)]
        labels = [IGNORED]

        def add(role: str, text: str, counts: bool) -> None:
            body = [*self._encode(text), self._id(END)]
            ids.extend([self._id(role), *body])
            labels.extend([IGNORED, *(body if counts else [IGNORED] * len(body))])

        if system:
            add(SYSTEM, system, counts=False)
        for _ in range(2 if self._rng.random() < 0.25 else 1):
            exchange = self._exchange()
            add(USER, exchange.question, counts=False)
            add(ASSISTANT, exchange.answer(style), counts=True)
        return Sample(ids, labels)

    def _id(self, token: str) -> int:
        return SPECIALS.index(token)

    def _encode(self, text: str) -> list[int]:
        if text not in self._cache:
            self._cache[text] = self._tokenizer.encode(text, add_special_tokens=False)
        return self._cache[text]


def collate(samples: Sequence[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded input ids and labels, both [batch, longest]."""
    longest = max(len(sample.ids) for sample in samples)
    ids = torch.zeros(len(samples), longest, dtype=torch.int64)
    labels = torch.full((len(samples), longest), IGNORED)
    for row, sample in enumerate(samples):
        ids[row, : len(sample.ids)] = torch.tensor(sample.ids)
        labels[row, : len(sample.labels)] = torch.tensor(sample.labels)
    return ids, labels


def batches(
    draw: Iterator[Sample], batch_size: int, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of samples of similar length, in random order of length."""
    rng = random.Random(seed)
    while True:
        pool = sorted(
            (next(draw) for _ in range(batch_size * 8)), key=lambda sample: len(sample.ids)
        )
        starts = list(range(0, len(pool), batch_size))
        rng.shuffle(starts)
        for start in starts:
            yield collate(pool[start : start + batch_size])


def chat_sample(tokenizer: PreTrainedTokenizerFast, exchange: Exchange, style: str) -> Sample:
    """One question through the chat template, followed by its answer."""
    messages = [{"role": "user", "content": exchange.question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    answer = [
        *tokenizer.encode(exchange.answer(style), add_special_tokens=False),
        SPECIALS.index(END),
    ]
    return Sample([*prompt, *answer], [*[IGNORED] * len(prompt), *answer])


def talk_sample(tokenizer: PreTrainedTokenizerFast, talk: Talk) -> Sample:
    """A conversation through the chat template; the assistant's turns count, but for what `talk` excepts."""
    ids = tokenizer.apply_chat_template(talk.messages, tools=talk.tools or None, return_dict=False)
    labels = [IGNORED] * len(ids)
    assistant = SPECIALS.index(ASSISTANT)
    end = SPECIALS.index(END)
    starts = [index + 1 for index, token_id in enumerate(ids) if token_id == assistant]
    for turn, start in enumerate(starts):
        stop = ids.index(end, start) + (turn not in talk.open_turns)
        start += talk.is_started
        labels[start:stop] = ids[start:stop]
    return Sample(ids, labels)
