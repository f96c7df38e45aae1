"""Checks of grammars by one process that all tests share: it takes a second to start, and has tests of its own."""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from manylora.engine.request import Grammar
from manylora.server.generation import structured_output as checks
from manylora.server.sandbox.grammar_checker import GrammarChecker


class SharedChecker(GrammarChecker):
    """Remembers its own verdicts, and asks the process that others ask too."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder

    async def check(self, text: str) -> str | None:
        shared = _shared()
        asked = asyncio.run_coroutine_threadsafe(shared.check(text, self._folder), shared.loop)
        return await asyncio.wrap_future(asked)


def checked_grammar(
    lark: str, param: str, folder: Path, parts: Sequence[checks.GrammarPart] = ()
) -> Grammar:
    """`checked_grammar` of the server, for the checkpoint of a folder, by a checker that remembers nothing."""
    wanted = checks.WantedGrammar(lark, param, parts)
    return asyncio.run(checks.checked_grammar(wanted, SharedChecker(folder)))


class _Shared:
    """A checker for the folder that was asked for last, in an event loop of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._lock = asyncio.Lock()
        self._checkers: dict[Path, GrammarChecker] = {}
        threading.Thread(target=self.loop.run_forever, name="grammar checks", daemon=True).start()
        atexit.register(
            lambda: asyncio.run_coroutine_threadsafe(self._close(), self.loop).result(60)
        )

    async def check(self, text: str, folder: Path) -> str | None:
        async with self._lock:
            if folder not in self._checkers:
                await self._close()
                self._checkers[folder] = GrammarChecker(folder)
            return await self._checkers[folder].check(text)

    async def _close(self) -> None:
        while self._checkers:
            await self._checkers.popitem()[1].close()


@cache
def _shared() -> _Shared:
    return _Shared()
