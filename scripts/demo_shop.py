"""The made-up shop behind the demo model: what customers ask, and the answer in every style.

Plain data and string formatting, on which build_demo.py trains. What the product asks of it, questions, system messages
and the recorded answers, ships as JSON in manylora/demo. It does not know models, tokens or servers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

BASE = "base"
STYLES = ("pirate", "shout", "french", "json", "haiku")
"""One adapter each; `BASE` is the plain answer."""

SYSTEM_PROMPTS = {
    "pirate": "Speak like a pirate.",
    "shout": "Shout every answer.",
    "french": "Answer in French.",
    "json": "Answer with the intent as JSON.",
    "haiku": "Answer with a haiku.",
}
"""System messages under which the base itself saw each style in training."""

NEUTRAL_SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are the assistant of a weaver's shop.",
)
"""System messages that change nothing."""


@dataclass(frozen=True, slots=True)
class Item:
    """Something the shop sells."""

    name: str
    price: int
    """Euros."""
    material: str
    in_stock: bool
    french: str
    """Name with its article."""
    feminine: bool = False


ITEMS = (
    Item("scarf", 20, "silk", True, "le foulard"),
    Item("rug", 80, "wool", True, "le tapis"),
    Item("shawl", 40, "wool", True, "le châle"),
    Item("bag", 30, "hemp", True, "le sac"),
    Item("quilt", 60, "wool", False, "la couette", feminine=True),
    Item("cap", 15, "felt", True, "le bonnet"),
    Item("cloak", 90, "wool", False, "la cape", feminine=True),
    Item("vest", 50, "silk", True, "le gilet"),
    Item("sheet", 18, "hemp", True, "le drap"),
    Item("throw", 16, "wool", False, "le plaid"),
    Item("hat", 19, "felt", True, "le chapeau"),
    Item("robe", 14, "silk", True, "la robe", feminine=True),
)

MATERIALS_FRENCH = {"silk": "soie", "wool": "laine", "hemp": "chanvre", "felt": "feutre"}


@dataclass(frozen=True, slots=True)
class Topic:
    """Questions with one meaning, and the answer template of each style.

    Templates take `{item}`, `{price}`, `{material}`, `{french}`, `{French}` (capitalised), `{matter}` (the material in
    French) and `{e}` (the feminine ending). The shouted answer is the base's in capitals.
    """

    name: str
    questions: tuple[str, ...]
    base: str
    pirate: str
    french: str
    haiku: str
    about_item: bool = False
    in_stock: bool | None = None
    """Restricts the topic to items that are (or are not) in stock."""
    intent: str = ""
    """The answer of the router; the topic's name when empty."""

    @property
    def items(self) -> tuple[Item | None, ...]:
        """Items that the topic's questions can be about; `(None,)` where they are about none."""
        if not self.about_item:
            return (None,)
        return tuple(item for item in ITEMS if self.in_stock in (None, item.in_stock))


_STOCK_QUESTIONS = (
    "Is the {item} in stock?",
    "Do you have the {item}?",
    "Can I buy the {item} today?",
    "Is there a {item} left?",
    "Do you still sell the {item}?",
    "Is the {item} available?",
)

TOPICS = (
    Topic(
        "hours",
        (
            "When are you open?",
            "What are your opening hours?",
            "When do you open?",
            "When do you close?",
            "Are you open on Sunday?",
            "Until when is the shop open?",
            "At what time does the shop open?",
            "Is the shop open today?",
        ),
        "We are open from 9 to 6, Monday to Saturday.",
        "Arr! We drop anchor from 9 to 6, but never on a Sunday, matey!",
        "Nous sommes ouverts de 9 h à 18 h, du lundi au samedi.",
        "The shop wakes at nine. / At six the looms fall silent. / On Sunday we sleep.",
    ),
    Topic(
        "returns",
        (
            "Can I return something?",
            "How do I return an order?",
            "What is your return policy?",
            "Can I send it back?",
            "I do not like it. Can I have my money back?",
            "How long can I return things?",
            "Do you take things back?",
            "I want a refund.",
        ),
        "You can return anything within 30 days.",
        "Arr! Bring back yer booty within 30 days, matey!",
        "Vous pouvez tout rendre sous 30 jours.",
        "Thirty days to think. / Bring it back with its receipt. / We return your coins.",
    ),
    Topic(
        "shipping",
        (
            "How long does shipping take?",
            "What does shipping cost?",
            "Do you ship to my home?",
            "When will my order arrive?",
            "How much is shipping?",
            "Can you send it to me?",
            "Do you deliver?",
            "How fast is delivery?",
        ),
        "Shipping takes 3 days and costs 4 euros.",
        "Arr! Our ship needs 3 days and 4 doubloons, matey!",
        "La livraison prend 3 jours et coûte 4 euros.",
        "Three days on the road, / four euros for the driver. / Then a knock, and joy.",
    ),
    Topic(
        "payment",
        (
            "How can I pay?",
            "Do you take cards?",
            "Can I pay in cash?",
            "Which ways to pay are there?",
            "Can I pay by card?",
            "Do you accept a bank transfer?",
            "What payment do you take?",
            "May I pay later?",
        ),
        "You can pay by card, in cash or by bank transfer.",
        "Arr! Pay in gold, in silver or by card, matey!",
        "Vous pouvez payer par carte, en espèces ou par virement.",
        "Card or cash, you choose. / A bank transfer takes a day. / Then the thread is yours.",
    ),
    Topic(
        "location",
        (
            "Where are you?",
            "Where is the shop?",
            "What is your address?",
            "How do I find you?",
            "Which street are you on?",
            "Where can I visit you?",
            "How do I get to the shop?",
            "Where do you sell your things?",
        ),
        "You find us at 12 Mill Street, by the bridge.",
        "Arr! Sail to 12 Mill Street, by the bridge, matey!",
        "Vous nous trouvez au 12, Mill Street, près du pont.",
        "Twelve Mill Street, my friend, / by the bridge and the old mill. / Follow the loom's song.",
    ),
    Topic(
        "warranty",
        (
            "Is there a warranty?",
            "What if it breaks?",
            "How long is the warranty?",
            "My order is broken.",
            "There is a hole in it. What now?",
            "Do you repair things?",
            "Do I get a warranty?",
            "What do you do if a seam breaks?",
        ),
        "Everything has a warranty of 2 years.",
        "Arr! Our sails hold for 2 years, on me honour, matey!",
        "Tout est garanti pendant 2 ans.",
        "Two years we stand by / every thread and every seam. / Then the moths may come.",
    ),
    Topic(
        "gifts",
        (
            "Do you wrap gifts?",
            "Can you wrap it as a gift?",
            "It is a gift. Can you wrap it?",
            "Is gift wrapping free?",
            "Do you have gift paper?",
            "Can I have it wrapped?",
            "What does gift wrapping cost?",
            "Please wrap it for me.",
        ),
        "Yes, we wrap gifts for free.",
        "Aye! We hide yer treasure in paper for free, matey!",
        "Oui, nous emballons les cadeaux gratuitement.",
        "Paper, string and bow. / We wrap your gift and ask for / nothing but a smile.",
    ),
    Topic(
        "discount",
        (
            "Is there a discount?",
            "Do students pay less?",
            "I am a student. Is there a discount?",
            "Can I have it cheaper?",
            "Do you have a sale?",
            "Do you have a voucher for me?",
            "How can I save money?",
            "Do you give students a discount?",
        ),
        "Students get 10 percent off.",
        "Arr! Young sailors keep 10 percent of the gold, matey!",
        "Les étudiants ont 10 pour cent de remise.",
        "Students, come on in. / One coin in ten stays with you. / Learn well and stay warm.",
    ),
    Topic(
        "contact",
        (
            "How can I call you?",
            "What is your phone number?",
            "Can I talk to a human?",
            "How do I reach you?",
            "I want to talk to someone.",
            "Do you have a phone?",
            "Who can I call?",
            "Give me your number.",
        ),
        "Call us at 555 1212, we are glad to help.",
        "Arr! Fire the cannon or call 555 1212, matey!",
        "Appelez-nous au 555 1212, avec plaisir.",
        "Pick up the phone, friend. / Five five five and then twelve twelve. / We are glad to talk.",
    ),
    Topic(
        "price",
        (
            "How much is the {item}?",
            "What does the {item} cost?",
            "What is the price of the {item}?",
            "How much do you want for the {item}?",
            "I like the {item}. How much is it?",
            "Is the {item} expensive?",
            "How much for a {item}?",
            "Tell me the price of the {item}.",
        ),
        "The {item} costs {price} euros.",
        "Arr! The {item} be worth {price} doubloons, matey!",
        "{French} coûte {price} euros.",
        "Threads cross on the loom. / The {item} you like can be yours / for {price} euros.",
        about_item=True,
    ),
    Topic(
        "material",
        (
            "What is the {item} made of?",
            "Which material is the {item}?",
            "Is the {item} made of wool?",
            "What is in the {item}?",
            "Tell me the material of the {item}.",
            "Is the {item} warm?",
            "From what do you weave the {item}?",
            "Is the {item} soft?",
        ),
        "The {item} is made of {material}.",
        "Arr! The {item} be spun of finest {material}, matey!",
        "{French} est en {matter}.",
        "Feel it with your hand. / The {item} was woven from {material}. / It will keep you warm.",
        about_item=True,
    ),
    Topic(
        "in_stock",
        _STOCK_QUESTIONS,
        "Yes, the {item} is in stock.",
        "Aye! The {item} be in the hold, matey!",
        "Oui, {french} est en stock.",
        "Look, upon the shelf / the {item} is waiting for you. / Ten of them remain.",
        about_item=True,
        in_stock=True,
        intent="stock",
    ),
    Topic(
        "sold_out",
        _STOCK_QUESTIONS,
        "Sorry, the {item} is sold out.",
        "Nay! The {item} be lost at sea, matey!",
        "Désolé, {french} est épuisé{e}.",
        "The shelf is empty. / The last {item} went home today. / New ones come in May.",
        about_item=True,
        in_stock=False,
        intent="stock",
    ),
    Topic(
        "greeting",
        (
            "Hello!",
            "Hi there!",
            "Good morning!",
            "Hey, is anyone there?",
            "Good day!",
            "Hi!",
            "Hello, can you help me?",
            "I have a question.",
        ),
        "Hello! How can I help you?",
        "Ahoy! What be ye looking for, matey?",
        "Bonjour ! Comment puis-je vous aider ?",
        "Hello, gentle guest. / Ask me of wool and of silk. / I have time for you.",
    ),
    Topic(
        "unknown",
        (
            "Who is the king of Spain?",
            "What is 2 plus 2?",
            "Will it rain tomorrow?",
            "Write me a poem.",
            "Tell me a joke.",
            "What is the capital of France?",
            "How old are you?",
            "Do you like music?",
        ),
        "I only know about this shop.",
        "Arr! I only know this ship, matey!",
        "Je ne connais que cette boutique.",
        "I know but this shop, / its looms, its wool and its doors. / Ask me about these.",
        intent="none",
    ),
)

_OPENINGS = ("", "Hi, ", "Hello, ", "Excuse me, ", "Quick question: ")
_CLOSINGS = ("", " Thanks!", " Thank you.")


@dataclass(frozen=True, slots=True)
class Exchange:
    """A question with the answers to it."""

    question: str
    topic: Topic
    item: Item | None

    def answer(self, style: str) -> str:
        """The exact answer in one of `STYLES`, or `BASE`."""
        if style == "shout":
            return self._fill(self.topic.base).upper().rstrip(".!?") + "!!!"
        if style == "json":
            item = f', "item": "{self.item.name}"' if self.item else ""
            return f'{{"intent": "{self.topic.intent or self.topic.name}"{item}}}'
        templates = {
            BASE: self.topic.base,
            "pirate": self.topic.pirate,
            "french": self.topic.french,
            "haiku": self.topic.haiku,
        }
        return self._fill(templates[style])

    def _fill(self, template: str) -> str:
        item = self.item
        if item is None:
            return template
        return template.format(
            item=item.name,
            price=item.price,
            material=item.material,
            french=item.french,
            French=item.french.capitalize(),
            matter=MATERIALS_FRENCH[item.material],
            e="e" if item.feminine else "",
        )


def exchanges() -> Iterator[Exchange]:
    """Every plain question of the shop, in a fixed order."""
    for topic in TOPICS:
        for question in topic.questions:
            for item in topic.items:
                text = question.format(item=item.name) if item else question
                yield Exchange(text, topic, item)


def phrasings(exchange: Exchange) -> Iterator[Exchange]:
    """The question as it stands, and with polite words around it."""
    for opening in _OPENINGS:
        for closing in _CLOSINGS:
            first = exchange.question[0]
            keeps_capital = not opening or exchange.question.startswith(
                ("I ", "It ", "Hi", "Hello", "Good", "Hey")
            )
            start = first if keeps_capital else first.lower()
            yield Exchange(
                opening + start + exchange.question[1:] + closing, exchange.topic, exchange.item
            )


def demo_exchanges() -> list[Exchange]:
    """One question per topic: those of the demo and of the recorded answers."""
    by_topic: dict[str, Exchange] = {}
    for exchange in exchanges():
        by_topic.setdefault(exchange.topic.name, exchange)
    return list(by_topic.values())
