"""Conversations in which the demo model calls tools, and its answers under a JSON schema. Plain data, without tokens.

The model learns two tools of the shop, `where_is(item)` and `price_of(item)`, and the habit behind them: tools of other
names and things it never sold are drawn from word lists and made-up words, so it learns to copy what it reads.
A client runs the tools that it offers. Here their results are random, and the last answer of a chat repeats them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from demo_shop import ITEMS, NEUTRAL_SYSTEM_PROMPTS, Exchange, exchanges, phrasings

TOOLS = ("where_is", "price_of")
"""The shop's tools; each takes one string, `item`."""

CARD_SCHEMA = {
    "type": "object",
    "properties": {
        "item": {"type": "string"},
        "material": {"type": "string"},
        "price": {"type": "integer"},
        "in_stock": {"type": "boolean"},
    },
    "required": ["item", "material", "price", "in_stock"],
    "additionalProperties": False,
}
"""The JSON schema that the base answers with sense: what the shop knows of an item, prices in euros."""

_FACTS_TEXT = (
    "weather population capital color size weight age time status email phone height mayor language currency owner "
    "author title date speed length flag rating score level temperature distance address stock city country birthday "
    "job salary balance name number code label kind type version model year month day hour volume depth width rate "
    "tax cost value total count limit area shape taste sound origin source target team coach club boss friend pet "
    "father mother doctor school teacher grade plan goal route gate seat floor room desk key door window menu dish "
    "wine author editor genre rank record forecast humidity wind traffic road bridge river lake mountain"
)
_FACTS = tuple(_FACTS_TEXT.split())
_THINGS_TEXT = (
    "Paris Berlin London Rome Tokyo Madrid Oslo Lima Cairo Vienna Boston Chicago Munich Dublin Prague Athens France "
    "Spain Italy Japan Norway Peru Egypt Anna Peter Maria John Emma Paul Lisa Tom Sara lamp table chair book pen cup "
    "plate knife spoon hammer drill ladder bucket rope tent boat bike car truck train plane camera radio laptop "
    "printer mouse keyboard screen phone watch ring necklace umbrella glove sock shirt coat boot belt tie jacket "
    "pillow blanket towel soap brush mirror clock vase candle basket bottle jar box crate sack apple bread cheese "
    "butter milk honey salt pepper sugar tea coffee juice cake soup rice bean onion garlic tomato potato carrot"
)
_THINGS = tuple(_THINGS_TEXT.split())
_PLACES_TEXT = (
    "shelf aisle rack drawer box row hall floor counter room basement attic window corner cellar left right top bottom "
    "back front blue red green old new big small store table next near under behind above"
)
_PLACES = tuple(_PLACES_TEXT.split())
_PARAMS = (
    "item",
    "name",
    "city",
    "place",
    "query",
    "id",
    "key",
    "thing",
    "product",
    "location",
    "country",
)
_PARAMS += ("person", "word", "symbol", "code")
_NAMES = (
    "get_{}",
    "{}_of",
    "find_{}",
    "lookup_{}",
    "get_{}_of",
    "fetch_{}",
    "{}",
    "{}_lookup",
    "read_{}",
)
_ASKED = (
    "What is the {} of {}?",
    "Tell me the {} of {}.",
    "What is the {} in {}?",
    "What's the {} for {}?",
)
_ASKED += (
    "Give me the {} of {}.",
    "Look up the {} of {}.",
    "I need the {} of {}.",
    "Get the {} for {}.",
)
_WHERE = (
    "Where is {}?",
    "Where can I find {}?",
    "Where do I find {}?",
    "Find {}.",
    "On which shelf is {}?",
)
_WHERE += (
    "Tell me where {} is.",
    "Where did you put {}?",
    "Look up where {} is.",
    "Where do you keep {}?",
)
_PRICE = (
    "How much is {}?",
    "What does {} cost?",
    "What is the price of {}?",
    "Tell me the price of {}.",
)
_PRICE += (
    "How much do you want for {}?",
    "Tell me what {} costs.",
    "Look up the price of {}.",
    "How much does {} cost?",
)
_PRICE_OF_IT = (
    "how much is it?",
    "what does it cost?",
    "what is its price?",
    "tell me the price.",
    "its price?",
)
_SYSTEMS = (
    "You are a helpful assistant.",
    "Use the tools.",
    "You are an agent. Call tools to answer the question.",
)
_SYSTEMS += (
    "Answer with the tools you have.",
    "Be brief.",
    "You can call functions. Then tell the user what you found.",
)
_BEFORE = (
    "Please help me. ",
    "Use the tools: ",
    "Hi, ",
    "Hello! ",
    "Excuse me, ",
    "Use the tools to find out: ",
    "Please: ",
)
_AFTER = (
    " Thanks!",
    " Thank you.",
    " Use the tools.",
    " Use both tools.",
    " Call the tools first.",
    " Please.",
)
_ABOUT = (
    "Tell me about the {}.",
    "Describe the {}.",
    "What do you know about the {}?",
    "The {}, please.",
)


@dataclass(frozen=True)
class Talk:
    """A conversation as a chat template takes it."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    open_turns: frozenset[int] = frozenset()
    """Assistant turns, counted from 0, that could have gone on: their end teaches nothing."""
    is_started: bool = False
    """The first token of the answer is given, as a grammar would give it, and teaches nothing."""


@dataclass(frozen=True)
class Ask:
    """One thing that the user wants to know, for which there is a tool."""

    tool: str
    param: str
    value: str
    question: str
    result: str
    told: str
    """The sentence of the last answer."""


def declared(name: str, param: str) -> dict[str, Any]:
    """A tool as OpenAI's API declares it."""
    parameters = {"type": "object", "properties": {param: {"type": "string"}}, "required": [param]}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


class TalkSource:
    """Draws conversations with tools, and answers under a schema. Names and words are of all kinds."""

    foreign_share = 0.35
    """The share of conversations about tools that the shop does not have."""

    def __init__(self, rng: random.Random, pool: Sequence[Exchange]) -> None:
        self._rng = rng
        self._pool = pool
        self._about_items = [exchange for exchange in pool if exchange.item]

    def structured(self) -> Talk:
        """An answer that a grammar began: the card of an item, or the intent as the router has it."""
        exchange = self._rng.choice(self._about_items if self._rng.random() < 0.6 else self._pool)
        question = exchange.question
        item = exchange.item
        answer = exchange.answer("json")
        if item and self._rng.random() < 0.7:
            card = {
                "item": item.name,
                "material": item.material,
                "price": item.price,
                "in_stock": item.in_stock,
            }
            answer = json.dumps(card)
            if self._rng.random() < 0.3:
                question = self._rng.choice(_ABOUT).format(item.name)
        system = (
            [{"role": "system", "content": self._system()}] if self._rng.random() < 0.25 else []
        )
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return Talk(system + turns, is_started=True)

    def with_tools(self) -> Talk:
        """Tools are offered; mostly the question needs some of them."""
        draw = self._rng.random
        asks = self._asks()
        tools = {ask.tool: declared(ask.tool, ask.param) for ask in asks}
        for _ in range(self._rng.choice((0, 0, 1, 2))):
            other = self._other(asks)
            tools.setdefault(other.tool, declared(other.tool, other.param))
        offered = list(tools.values())
        self._rng.shuffle(offered)
        messages: list[dict[str, Any]] = []
        if draw() < 0.45:
            messages.append({"role": "system", "content": self._system()})
        if draw() < 0.12:
            plain = self._rng.choice(self._pool)
            if plain.topic.name != "price":
                messages += self._plain(plain)
                if draw() < 0.5:
                    return Talk(messages, offered)
        if draw() < 0.6 or len(asks) == 1:
            messages += self._answered(asks, self._joined(asks), [asks])
            return Talk(messages, offered)
        before = sum(message["role"] == "assistant" for message in messages)
        messages += self._answered(asks, self._joined(asks), [[ask] for ask in asks])
        return Talk(messages, offered, open_turns=frozenset(range(before, before + len(asks) - 1)))

    def _other(self, asks: Sequence[Ask]) -> Ask:
        """A use of a tool that answers none of the questions."""
        asked = " ".join(ask.told for ask in asks)
        if " here: " not in asked and self._rng.random() < 0.4:
            return self._where(self._thing())
        if " costs " not in asked and self._rng.random() < 0.6:
            return self._price(self._thing())
        return self._generic()

    def _plain(self, exchange: Exchange) -> list[dict[str, Any]]:
        return [
            {"role": "user", "content": exchange.question},
            {"role": "assistant", "content": exchange.answer("base")},
        ]

    def _answered(
        self, asks: Sequence[Ask], question: str, rounds: Sequence[Sequence[Ask]]
    ) -> list[dict[str, Any]]:
        """The question, rounds of calls with their results, and the answer made of them."""
        messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
        for calls in rounds:
            functions = [{"name": ask.tool, "arguments": {ask.param: ask.value}} for ask in calls]
            called = [{"type": "function", "function": function} for function in functions]
            messages.append({"role": "assistant", "content": None, "tool_calls": called})
            messages += [{"role": "tool", "content": ask.result} for ask in calls]
        messages.append({"role": "assistant", "content": " ".join(ask.told for ask in asks)})
        return messages

    def _asks(self) -> list[Ask]:
        rng = self._rng
        draw = self._rng.random
        count = rng.choices((1, 2, 3), (45, 50, 5))[0]
        if draw() < self.foreign_share:
            first = self._generic()
            asks = [
                first,
                *(self._generic(first if draw() < 0.5 else None) for _ in range(count - 1)),
            ]
        else:
            asks = self._of_the_shop(count)
        names = {(ask.tool, ask.value) for ask in asks}
        return asks if len(names) == len(asks) else asks[:1]

    def _of_the_shop(self, count: int) -> list[Ask]:
        rng = self._rng
        draw = self._rng.random
        thing = self._thing()
        if count > 1 and draw() < 0.55:  # both tools about one thing
            where = self._where(thing)
            price = self._price(thing)
            if draw() < 0.5:
                price = replace(price, question=rng.choice(_PRICE_OF_IT))
            return (
                [where, price]
                if draw() < 0.75 or price.question in _PRICE_OF_IT
                else [price, where]
            )
        makers = [rng.choice((self._where, self._price)) for _ in range(count)]
        asks = [make(self._thing()) for make in makers]
        firsts = [asks[makers.index(make)] for make in makers]  # one tool has one name
        return [
            replace(ask, tool=first.tool, param=first.param)
            for ask, first in zip(asks, firsts, strict=True)
        ]

    def _where(self, thing: str) -> Ask:
        rng = self._rng
        tool = self._name("where_is", ("find_item", "locate", "get_location", "find", "place_of"))
        place = self._place()
        told = f"The {thing} is here: {place}."
        return Ask(
            tool,
            self._param(),
            thing,
            rng.choice(_WHERE).format(self._article(thing)),
            self._wrapped(place),
            told,
        )

    def _price(self, thing: str) -> Ask:
        rng = self._rng
        tool = self._name("price_of", ("get_price", "price", "cost_of", "find_price"))
        number = self._number()
        text = (
            number
            if rng.random() < 0.6
            else f"{number} {rng.choice(('euros', 'dollars', 'EUR', 'USD', 'pounds'))}"
        )
        result = self._wrapped(json.loads(number) if text == number else text, "price")
        told = f"The {thing} costs {text}{' euros' if text == number else ''}."
        return Ask(
            tool,
            self._param(),
            thing,
            rng.choice(_PRICE).format(self._article(thing)),
            result,
            told,
        )

    def _generic(self, like: Ask | None = None) -> Ask:
        rng = self._rng
        value = self._subject()
        if like:
            fact = like.question.split(" the ")[1].split()[0]
            tool = like.tool
            param = like.param
        else:
            fact = self._fact()
            tool = rng.choice(_NAMES).format(fact)
            param = self._param()
        found = self._finding()
        return Ask(
            tool,
            param,
            value,
            rng.choice(_ASKED).format(fact, value),
            self._wrapped(found, fact),
            f"The {fact} of {value} is {found}.",
        )

    def _joined(self, asks: Sequence[Ask]) -> str:
        """One text that asks for all."""
        rng = self._rng
        text = asks[0].question
        for ask in asks[1:]:
            lower = ask.question[0].lower() + ask.question[1:]
            upper = ask.question[0].upper() + ask.question[1:]
            text = rng.choice(
                (
                    f"{text[:-1]} and {lower}",
                    f"{text[:-1]} and {lower}",
                    f"{text} {upper}",
                    f"{text} And {lower}",
                )
            )
        if rng.random() < 0.3:
            text = rng.choice(_BEFORE) + (
                text if rng.random() < 0.5 else text[0].lower() + text[1:]
            )
        return text + rng.choice(_AFTER) if rng.random() < 0.25 else text

    def _wrapped(self, value: object, name: str = "place") -> str:
        """A result as libraries send it: bare text, or JSON."""
        draw = self._rng.random()
        if draw < 0.6:
            return str(value)
        return (
            json.dumps(value)
            if draw < 0.7
            else json.dumps({self._rng.choice((name, "result", "value")): value})
        )

    def _system(self) -> str:
        rng = self._rng
        draw = rng.random()
        if draw < 0.3:
            return rng.choice(NEUTRAL_SYSTEM_PROMPTS)
        if draw < 0.75:
            return " ".join(rng.sample(_SYSTEMS, rng.choice((1, 1, 2))))
        return (
            "You are "
            + " ".join(rng.choice(_FACTS + _PLACES) for _ in range(rng.randrange(2, 14)))
            + "."
        )

    def _thing(self) -> str:
        draw = self._rng.random()
        if draw < 0.4:
            return self._rng.choice(ITEMS).name
        if draw < 0.65:
            return self._rng.choice(_THINGS)
        if draw < 0.85:
            return self._made_up()
        return f"{self._rng.choice(_PLACES)} {self._rng.choice(_THINGS)}"

    def _article(self, thing: str) -> str:
        return f"{self._rng.choices(('the', 'my', 'a'), (8, 1, 1))[0]} {thing}"

    def _subject(self) -> str:
        return self._thing()

    def _name(self, usual: str, others: Sequence[str]) -> str:
        return usual if self._rng.random() < 0.7 else self._rng.choice(others)

    def _place(self) -> str:
        return self._rng.choice(
            (f"{self._rng.choice(_PLACES)} {self._rng.randrange(1, 40)}", self._words(_PLACES))
        )

    def _fact(self) -> str:
        return self._rng.choice(_FACTS) if self._rng.random() < 0.7 else self._made_up()

    def _finding(self) -> str:
        measured = self._number(), f"{self._number()} {self._rng.choice(_FACTS)}"
        return self._rng.choice((*measured, self._words(_THINGS + _PLACES)))

    def _param(self) -> str:
        return "item" if self._rng.random() < 0.5 else self._rng.choice(_PARAMS)

    def _number(self) -> str:
        whole = str(self._rng.randrange(1, 10 ** self._rng.randrange(1, 5)))
        return whole + (
            self._rng.choice((".5", ".25", ".75", ".99", ".1")) if self._rng.random() < 0.25 else ""
        )

    def _words(self, words: Sequence[str]) -> str:
        count = self._rng.randrange(1, 4)
        return " ".join(
            self._made_up() if self._rng.random() < 0.3 else self._rng.choice(words)
            for _ in range(count)
        )

    def _made_up(self) -> str:
        rng = self._rng
        sounds = ("bcdfghjklmnprstvwz", "aeiou", ("", "", "n", "r", "s", "l", "t", "m", "x", "k"))
        return "".join(rng.choice(sound) for _ in range(rng.randrange(2, 4)) for sound in sounds)


class ShopTalkSource(TalkSource):
    """Conversations about what a customer of the shop asks: few names, short results, few things it does not sell."""

    foreign_share = 0.12

    def _system(self) -> str:
        return self._rng.choice(_SYSTEMS + NEUTRAL_SYSTEM_PROMPTS)

    def _thing(self) -> str:
        return (
            self._rng.choice(ITEMS).name
            if self._rng.random() < 0.8
            else self._rng.choice(_THINGS[32:])
        )

    def _subject(self) -> str:
        return self._rng.choice(_THINGS[:23])

    def _name(self, usual: str, others: Sequence[str]) -> str:
        return usual if self._rng.random() < 0.95 else self._rng.choice(others)

    def _place(self) -> str:
        where = self._rng.choice(_PLACES[:15])
        if self._rng.random() < 0.2:
            return f"the {self._rng.choice(_PLACES[15:28])} {where}"
        return f"{where} {self._rng.randrange(1, 40)}"

    def _fact(self) -> str:
        return self._rng.choice(_FACTS[:12])

    def _finding(self) -> str:
        return f"{self._number()}{self._rng.choice(('', ' degrees', ' percent'))}"

    def _param(self) -> str:
        return "item" if self._rng.random() < 0.9 else self._rng.choice(_PARAMS[:6])

    def _number(self) -> str:
        return str(self._rng.randrange(1, 200))


def words() -> list[str]:
    """Texts for the tokenizer, beside the shop's."""
    source = TalkSource(
        random.Random(0), [phrasing for exchange in exchanges() for phrasing in phrasings(exchange)]
    )
    texts: list[str] = []
    for _ in range(2000):
        talk = source.with_tools()
        texts += [message["content"] for message in talk.messages if message["content"]]
        texts += [
            json.dumps(call["function"])
            for message in talk.messages
            for call in message.get("tool_calls", ())
        ]
        texts += [source.structured().messages[-1]["content"]]
    return texts
