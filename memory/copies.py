"""Copies pages from host memory into the arena, from a thread other than the engine's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from weft.memory.arena import Arena

BYTES_AT_ONCE = 1 << 20
"""A CPU copies these in a tenth of a millisecond; that a step and two threads take turns costs more."""


class PageCopier:
    """Blocking page copies; on CUDA they run on a stream of their own beside the steps.

    Args:
        arena: Where to.
        pause: Called after each page on a CPU; elsewhere copies take no core.
    """

    def __init__(self, arena: Arena, pause: Callable[[], None] = lambda: None) -> None:
        self._arena = arena
        self._pause = pause
        self.pages_at_once = BYTES_AT_ONCE // arena.geometry.page_bytes if arena.device.type == "cpu" else 0
        """Pages that the engine's thread may copy between two steps."""
        self._stream = torch.cuda.Stream(arena.device) if arena.device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def fence(self) -> torch.cuda.Event | None:
        """Mark what the calling thread has launched so far; a copy given the mark starts after it."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._arena.device))
        return event

    def copy_now(self, sources: Sequence[torch.Tensor], pages: Sequence[int]) -> None:
        """Overwrite a few arena pages of a CPU without a pause, at most `pages_at_once` of them between two steps.

        Args:
            sources: uint8 [page_bytes] each.
            pages: Arena page for each source; no step may be reading it.
        """
        for source, page in zip(sources, pages, strict=True):
            self._arena.bytes[page].copy_(source)

    def copy(self, sources: Sequence[torch.Tensor], pages: Sequence[int], fence: torch.cuda.Event | None) -> None:
        """Overwrite arena pages, and return when the bytes are there.

        Args:
            sources: uint8 [page_bytes] each, on the host.
            pages: Arena page for each source; no step may be reading it.
            fence: From `fence`, taken after the pages were allocated.
        """
        if self._stream is None:
            for source, page in zip(sources, pages, strict=True):
                self._arena.bytes[page].copy_(source)
                self._pause()
            return
        with torch.cuda.stream(self._stream):
            if fence is not None:
                self._stream.wait_event(fence)
            for source, page in zip(sources, pages, strict=True):
                self._arena.bytes[page].copy_(source, non_blocking=True)
        self._stream.synchronize()
