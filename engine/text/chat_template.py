"""The chat template of a checkpoint: a program that writes a conversation for the model, run by `transformers`.

A template is code from a downloaded folder. It cannot leave Jinja's sandbox, but it may take any time and memory, so a
server renders in a process with limits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from manylora.errors import InvalidRequestError

MAX_CHARACTERS = 1 << 23
"""Largest text that a template may write."""
_MAX_REASON = 300
_HALF_CHARACTER = re.compile("[\ud800-\udfff]")
UNUSABLE = "chat_template_unusable"
_USE_COMPLETIONS = "Use /v1/completions with the prompt as the model expects it."


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
