"""Chats as the model's template writes them. It is code of the checkpoint, so processes with limits run it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from manylora.engine.text.tokenizer import UNUSABLE, Tokenizer, unusable
from manylora.errors import CapacityError, InvalidRequestError
from manylora.server.process.fair_semaphore import FairSemaphore
from manylora.server.process.threads import place_in, to_its_end
from manylora.server.sandbox.processes import LimitReachedError, NoAnswerError, SandboxedProcesses

CHILDREN = 2
"""Chats that are rendered at once; twice as many while one tenant has more than its share."""
CPU_S = 1.0
"""CPU seconds that a chat may take. One of 4,000 messages takes a tenth of one."""
WALL_S = 20.0
"""Seconds after which a chat is given up; a process takes some to start."""
_IS_SLOW = "takes too much computing time or memory"
TRIAL = {"messages": [{"role": "user", "content": "Hello"}]}


class ChatRenderer:
    """Renders chats for the template of a tokenizer. Thread: the event loop's.

    Args:
        tokenizer: Of the model.
        cpu_s: CPU seconds that a chat may take.
    """

    def __init__(self, tokenizer: Tokenizer, cpu_s: float = CPU_S) -> None:
        self._tokenizer = tokenizer
        self._cpu_s = cpu_s
        self.template = asdict(tokenizer.chat_template)
        """The template as the processes get it."""
        self._processes = SandboxedProcesses("manylora.server.sandbox.chat_worker", self.template)
        self._places = FairSemaphore(CHILDREN, spare=CHILDREN)
        self._fault: str | None = None

    async def try_template(self) -> str | None:
        """Try the template with a greeting; returns why chats will be refused, or None where they will not."""
        if self._tokenizer.chat_template.source:
            try:
                await self.render(TRIAL)
            except InvalidRequestError as error:
                self._fault = error.message if error.code == UNUSABLE else None
        return self._fault

    async def render(self, chat: Mapping[str, Any], num_bytes: int = 0) -> str:
        """A chat as the model reads it. Tenants have places in turns, so that slow chats of one delay no others.

        Args:
            chat: The arguments of `ChatTemplate.render`, of JSON types.
            num_bytes: About its length.

        Raises:
            InvalidRequestError: The template refuses it, or takes too much time or memory.
            CapacityError: It could not be rendered just now.
        """
        self._tokenizer.check_template_kwargs(chat.get("template_kwargs", {}))
        if self._fault is not None:
            raise InvalidRequestError(self._fault, code=UNUSABLE, param="messages")
        async with place_in(self._places):
            # A process that is not waited for would have to be ended.
            found = await to_its_end(self.answer(dict(chat), num_bytes))
        if "text" not in found:
            raise InvalidRequestError(found["refused"], code=found["code"], param="messages")
        return str(found["text"])

    async def answer(self, job: dict[str, Any], num_bytes: int) -> dict[str, Any]:
        """The answer of `chat_worker`."""
        try:
            found = await self._processes.ask(
                job, cpu_s=self._cpu_s, wall_s=WALL_S, num_bytes=num_bytes
            )
            return dict(found)
        except LimitReachedError as error:
            raise unusable(f"{_IS_SLOW} for these messages") from error
        except NoAnswerError as error:
            raise CapacityError(
                "Chats cannot be rendered just now. Try again in a moment."
            ) from error

    async def close(self) -> None:
        """End the processes."""
        await self._processes.close()
