"""The model's tokenizer and chat template, with `transformers`. No code of the checkpoint is ever run.

`transformers` is imported when a tokenizer is made. Encoding and rendering take milliseconds and belong in a thread;
long texts do not hold the interpreter's lock there.

A chat template is code from a downloaded folder. It cannot leave Jinja's sandbox, but it may take any time and memory,
so a server renders in a process with limits.
"""

from __future__ import annotations

import inspect
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

from manylora.errors import ConfigError, InvalidRequestError

MAX_CHARACTERS = 1 << 23
"""Largest text that a template may write."""
_MAX_REASON = 300
_HALF_CHARACTER = re.compile("[\ud800-\udfff]")
UNUSABLE = "chat_template_unusable"
_USE_COMPLETIONS = "Use /v1/completions with the prompt as the model expects it."
MAX_TOKEN_ID = 1 << 31
LONG = 4096
"""Number of tokens from which decoding releases the interpreter's lock, and of characters normalized at once."""
NFC_SHRINKS = 4
"""Largest number of bytes of a text per byte of its normal form C."""
MAX_SWELLING = 4
_DROPPING = ("Removed", "Whitespace", "Bert", "CharDelimiterSplit")
"""Words in the description of a pre-tokenizer that drops parts of a text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """A chat template.

    Args:
        source: Template in Jinja, or several by name; empty if the model has none.
        variables: Variables of the template beside the conversation: the special tokens.
    """

    source: str | dict[str, str]
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """Text of the template, or of all templates if there are several."""
        return self.source if isinstance(self.source, str) else "\n".join(self.source.values())

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        template_kwargs: Mapping[str, Any] = MappingProxyType({}),
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """Write a conversation with the template.

        Args:
            messages: Messages in the form of the template.
            tools: Tools that may be called; an empty list is not shown to the template.
            template_kwargs: Further variables of the template.
            add_generation_prompt: End where the assistant begins to speak.
            continue_final_message: End inside the last message.

        Raises:
            InvalidRequestError: There is no template, it is broken, or it refuses these messages.
            MemoryError: There is not enough memory.
        """
        from jinja2 import TemplateError, TemplateSyntaxError
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            rendered: Any = render_jinja_template(
                conversations=[[_without_none(message) for message in messages]],
                tools=[dict(tool) for tool in tools] or None,
                chat_template=self._chosen(has_tools=bool(tools)),
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **{**self.variables, **template_kwargs},
            )
        except (MemoryError, InvalidRequestError):
            raise
        except TemplateSyntaxError as error:
            raise unusable(f"is not valid Jinja at line {error.lineno}") from error
        except Exception as error:  # a template may raise anything
            own = " ".join(str(error).split())[:_MAX_REASON] if type(error) is TemplateError else ""
            reason = f' It says: "{own}"' if own else ""
            message = "The model's chat template does not take these messages: check their roles, order and content."
            raise InvalidRequestError(message + reason, param="messages") from error
        text: str = rendered[0][0]
        if len(text) > MAX_CHARACTERS:
            raise unusable(f"writes more than {MAX_CHARACTERS} characters for these messages")
        if _HALF_CHARACTER.search(text):
            raise unusable("writes halves of characters, which are no text")
        return text

    def _chosen(self, *, has_tools: bool) -> str:
        if not self.source:
            message = f"This model has no chat template. {_USE_COMPLETIONS}"
            raise InvalidRequestError(message, code="no_chat_template", param="messages")
        if isinstance(self.source, str):
            return self.source
        for name in ("tool_use", "default")[not has_tools :]:
            if name in self.source:
                return self.source[name]
        raise unusable("is one of several, none of which is named default")


def unusable(reason: str) -> InvalidRequestError:
    """Make the refusal of a chat that the model's template cannot write."""
    message = f"This model's chat template {reason}. {_USE_COMPLETIONS}"
    return InvalidRequestError(message, code=UNUSABLE, param="messages")


def _without_none(message: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a message without None, as transformers shows it to templates."""
    return {name: value for name, value in message.items() if value is not None}


@contextmanager
def _own_errors() -> Iterator[None]:
    """Refuse a text at which the library panics. Its regular expressions do so after many steps."""
    try:
        yield
    except (
        BaseException
    ) as error:  # a panic of Rust is no Exception, and its class cannot be imported
        if type(error).__name__ != "PanicException":
            raise
        message = "This model's tokenizer gives up on this text: one of its regular expressions takes too long for it."
        raise InvalidRequestError(message, code="tokenizer_unusable") from None


class Tokenizer:
    """Text to token ids and back. Thread-safe.

    Args:
        path: Folder of the checkpoint, or a hub id.

    Raises:
        ConfigError: There is no tokenizer that the `tokenizers` library can run.
    """

    def __init__(self, path: str | Path) -> None:
        from transformers import AutoTokenizer

        # Without this, the first long text starts a thread on every core.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # noqa: TID251 - `tokenizers` reads it
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(path), trust_remote_code=False)
        except Exception as error:  # transformers checks little of the files
            reason = " ".join(str(error).split())[:200]
            message = (
                f"model.path must have a tokenizer, got {path}: {reason or type(error).__name__}"
            )
            raise ConfigError(message, param="model.path") from error
        # transformers' own encode changes shared state on every call, which is not safe in threads.
        self._backend: Any = getattr(self._tokenizer, "backend_tokenizer", None)
        if self._backend is None:
            raise ConfigError(
                f"model.path must have a tokenizer.json, got {path}", param="model.path"
            )
        self._backend.no_truncation()
        self._backend.no_padding()
        template = self._tokenizer.chat_template or ""
        if not all(
            isinstance(text, str)
            for text in (template.values() if isinstance(template, dict) else [template])
        ):
            raise ConfigError(f"chat_template: expected text, in {path}", param="model.path")
        self.folder = Path(path)
        self.eos_token_ids = read_eos_token_ids(self.folder) | {self._tokenizer.eos_token_id} - {
            None
        }
        """Tokens that end a generation."""
        self.settings = _settings(self.folder)
        """Content of tokenizer_config.json, with the chat template where that has a file of its own."""
        self.token_text = lru_cache(maxsize=65536)(self._token_text)

    @property
    def vocab_size(self) -> int:
        """Ids below this have a text. The model may have more."""
        return len(self._tokenizer)

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The model's chat template, which may be empty."""
        source = self._tokenizer.chat_template or ""
        return ChatTemplate(source=source, variables=dict(self._tokenizer.special_tokens_map))

    @property
    def response_template(self) -> dict[str, Any] | None:
        """The checkpoint's description of its answers, for transformers' parser."""
        return getattr(self._tokenizer, "response_template", None)

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """Ids of the special tokens by their text."""
        return {token.content: token_id for token_id, token in self._added.items() if token.special}

    @property
    def grammar_tokens(self) -> dict[str, int]:
        """Ids of the tokens that grammars name by id. For llguidance, tags among the added tokens are special too."""
        return self.special_tokens | {
            token.content: token_id
            for token_id, token in self._added.items()
            if token.content.startswith("<") and token.content.endswith(">")
        }

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Encode a text, with the model's own start token if wanted.

        Raises:
            InvalidRequestError: A regular expression of the tokenizer takes too long for this text.
        """
        encode = self._backend.encode_batch_fast  # it releases the lock
        with _own_errors():
            token_ids: list[int] = encode([text], add_special_tokens=add_special_tokens)[0].ids
        return token_ids

    def text_offsets(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Place in a text where each of its tokens begins. Tokens that share a character have that character's place.

        Raises:
            InvalidRequestError: As in `encode`.
        """
        encode = self._backend.encode_batch  # it releases the lock
        offsets = [0]
        end = 0
        with _own_errors():
            encoding = encode([text], add_special_tokens=add_special_tokens)[0]
        for start, stop in encoding.offsets:
            is_added = start == stop == 0
            offsets.append(max(offsets[-1], end if is_added else min(start, end)))
            end = max(end, stop)
        return offsets[1:]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids. Unknown ids have none."""
        if len(token_ids) < LONG:
            text: str = self._backend.decode(
                list(token_ids), skip_special_tokens=skip_special_tokens
            )
        else:
            text = self._backend.decode_batch(
                [list(token_ids)], skip_special_tokens=skip_special_tokens
            )[0]
        return text

    @cached_property
    def max_token_bytes(self) -> int | None:
        """Largest number of bytes of a text per token; None if it is unknown, as parts of a text may be dropped."""
        backend = self._backend
        added = self._added.values()
        normalizer = str(backend.normalizer)
        pieces = backend.get_vocab(with_added_tokens=False)
        is_bytes = (
            "ByteLevel" in str(backend.pre_tokenizer) and type(backend.model).__name__ == "BPE"
        )
        has_all_bytes = (
            is_bytes and self._is_byte_level and pieces.keys() >= self._byte_of_letter.keys()
        )
        is_dropping = any(word in str(backend.pre_tokenizer) for word in _DROPPING)
        is_swallowing = any(token.lstrip or token.rstrip for token in added)
        if not has_all_bytes or is_dropping or is_swallowing or normalizer not in ("None", "NFC()"):
            return None
        longest = max(chain(map(len, pieces), (len(token.content.encode()) for token in added)))
        return longest * (NFC_SHRINKS if normalizer != "None" else 1)

    def swells(self, text: str) -> bool:
        """True if normalizing multiplies the length of a long text by more than `MAX_SWELLING`, as NFKC can.

        Raises:
            InvalidRequestError: As in `encode`.
        """
        normalizer = self._backend.normalizer
        if len(text) < LONG or str(normalizer) in ("None", "NFC()"):
            return False
        parts = (
            text[start : start + LONG] for start in range(0, len(text), LONG)
        )  # each holds the lock meanwhile
        with _own_errors():
            return sum(len(normalizer.normalize_str(part)) for part in parts) > MAX_SWELLING * len(
                text
            )

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Encode a conversation, up to where the assistant speaks.

        Raises:
            InvalidRequestError: The model has no chat template, or its template refuses these messages.
        """
        return self.encode(self.chat_template.render(messages), add_special_tokens=False)

    def check_template_kwargs(self, template_kwargs: Mapping[str, Any]) -> None:
        """Refuse variables of a chat template that a client may not set.

        Raises:
            InvalidRequestError: Manylora or transformers sets a variable of this name.
        """
        taken = sorted(self._template_names.intersection(template_kwargs))
        if taken:
            raise InvalidRequestError(
                f"chat_template_kwargs cannot set {', '.join(taken)}; leave it out.",
                param="chat_template_kwargs",
            )

    @cached_property
    def _template_names(self) -> frozenset[str]:
        """Variables of chat templates that a client may not set."""
        own = inspect.signature(self._tokenizer.apply_chat_template).parameters
        return frozenset({*own, "conversations", "messages", *self._tokenizer.special_tokens_map})

    def may_end_text(self, token_id: int, *, skip_special_tokens: bool = True) -> bool:
        """True if the text up to this token can be final. A raw byte may need others; skipped tokens have no text."""
        return token_id not in self._byte_tokens and not (
            skip_special_tokens and token_id in self._special_ids
        )

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of a token, which may be part of a character."""
        if token_id in self._byte_tokens:
            return bytes([self._byte_tokens[token_id]])
        piece: str | None = self._backend.id_to_token(token_id)
        if piece and token_id not in self._added and self._byte_of_letter.keys() >= set(piece):
            return bytes(self._byte_of_letter[letter] for letter in piece)
        return self.token_text(token_id).encode()

    def _token_text(self, token_id: int) -> str:
        """Text of a token inside a text. Special tokens are spelled out."""
        anchor = self._anchor
        before = self.decode(anchor, skip_special_tokens=False)
        return self.decode([*anchor, token_id], skip_special_tokens=False)[len(before) :]

    @cached_property
    def _anchor(self) -> list[int]:
        """A token to put before another, because decoders drop the space at the start of a text."""
        return self.encode("a", add_special_tokens=False)[-1:]

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(self.special_tokens.values())

    @cached_property
    def _added(self) -> dict[int, Any]:
        """Added tokens by id, which stand for their own letters in every vocabulary."""
        added: dict[int, Any] = self._backend.get_added_tokens_decoder()
        return added

    @cached_property
    def _is_byte_level(self) -> bool:
        return "ByteLevel" in str(self._backend.decoder)

    @cached_property
    def _byte_of_letter(self) -> dict[str, int]:
        """Bytes by the letters that spell them in a byte-level vocabulary; empty for other vocabularies."""
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        letters = bytes_to_unicode()  # type: ignore[no-untyped-call]
        return {letter: byte for byte, letter in letters.items()} if self._is_byte_level else {}

    @cached_property
    def _byte_tokens(self) -> dict[int, int]:
        if self._is_byte_level:
            return {}
        found = {f"<0x{byte:02X}>": byte for byte in range(256)}
        ids = {self._backend.token_to_id(piece): byte for piece, byte in found.items()}
        return {token_id: byte for token_id, byte in ids.items() if token_id is not None}


def read_eos_token_ids(folder: Path) -> frozenset[int]:
    """End-of-sequence tokens in generation config, model config and tokenizer config; there may be none."""
    token_ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        named = read_object(folder / name).get("eos_token_id")
        for token_id in named if isinstance(named, list) else [] if named is None else [named]:
            if type(token_id) is not int or not 0 <= token_id < MAX_TOKEN_ID:
                message = f"eos_token_id: expected token ids in {folder / name}, got {repr(token_id)[:80]}"
                raise ConfigError(message, param="model.path")
            token_ids.add(token_id)
    eos = read_object(folder / "tokenizer_config.json").get("eos_token")
    text = eos.get("content") if isinstance(eos, dict) else eos
    added = read_object(folder / "tokenizer.json").get("added_tokens")
    for token in added if isinstance(added, list) and isinstance(text, str) else []:
        if (
            isinstance(token, dict)
            and token.get("content") == text
            and type(token.get("id")) is int
        ):
            token_ids.add(token["id"])
    return frozenset(token_ids)


def _settings(folder: Path) -> dict[str, Any]:
    settings = read_object(folder / "tokenizer_config.json")
    template = folder / "chat_template.jinja"
    if template.is_file():
        settings["chat_template"] = template.read_text(encoding="utf-8")
    return settings


def read_object(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file; empty if there is no file or no object in it.

    Raises:
        ConfigError: The file is no JSON.
    """
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"model.path: cannot read {path}: it is no JSON", param="model.path"
        ) from error
    return content if isinstance(content, dict) else {}
