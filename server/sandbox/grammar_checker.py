"""Checks of grammars in a process with limits, because no limit of llguidance bounds what some schemas take to read."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

from manylora.engine.grammar.problems import TOO_COMPLEX
from manylora.engine.request import Grammar
from manylora.errors import CapacityError
from manylora.server.process.fair_semaphore import FairSemaphore
from manylora.server.process.threads import acting, to_its_end
from manylora.server.sandbox.processes import (
    LimitReachedError,
    NoAnswerError,
    SandboxedProcesses,
    WallTimeError,
)

CPU_S = 0.075
"""CPU seconds that a grammar may take. A schema of 1,000 properties takes 0.04 with 151,000 tokens, one of 200 0.01."""
WALL_S = 20.0
"""Seconds after which a check is given up; the first makes the tokenizer, which takes some."""
MAX_REMEMBERED = 1024


class GrammarChecker:
    """Checks one grammar at a time, in some milliseconds, or 0.075 s for what is refused by time.

    Thread: the event loop's.

    Args:
        folder: Of the checkpoint, for whose tokens grammars are compiled.
    """

    def __init__(self, folder: Path) -> None:
        self._processes = SandboxedProcesses(
            "manylora.server.sandbox.grammar_worker", str(folder.absolute())
        )
        self.places = FairSemaphore(1)
        """The place of the grammar that is being checked."""
        self._remembered: OrderedDict[tuple[str, str], str | None] = OrderedDict()
        """By tenant and digest, so that nobody learns from a short wait what others sent."""

    async def problem(self, grammar: Grammar, tenant: str) -> str | None:
        """The fault of a grammar; None if it is sound. Tenants take turns, with a check at a time.

        Raises:
            CapacityError: It could not be checked just now.
        """
        key = (tenant, grammar.digest)
        if key not in self._remembered:  # what is known waits for no check of others
            async with self.places.place(tenant, acting.get().weight):
                if key not in self._remembered:
                    # A process that is not waited for would have to be ended.
                    self._remembered[key] = await to_its_end(self.check(grammar.text))
                    if len(self._remembered) > MAX_REMEMBERED:
                        self._remembered.popitem(last=False)
        return self._remembered[key]

    async def check(self, text: str) -> str | None:
        """The answer of `grammar_worker`, or that a grammar is too complex for its limits.

        Raises:
            CapacityError: Two processes ended by something else than the grammar, or it had no time to check.
        """
        try:
            found: str | None = await self._processes.ask(
                text, cpu_s=CPU_S, wall_s=WALL_S, num_bytes=len(text)
            )
        except (WallTimeError, NoAnswerError) as error:
            message = "Grammars and schemas cannot be checked just now. Try again in a moment."
            raise CapacityError(message) from error
        except LimitReachedError:
            return TOO_COMPLEX
        return found

    async def close(self) -> None:
        """End the process."""
        await self._processes.close()
