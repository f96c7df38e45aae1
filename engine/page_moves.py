"""Moves the pages of a step before it computes: out to the host, zeroed, in from the host, copied on the device."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from weft.engine.plan import StepPlan
from weft.errors import PageAccountingError
from weft.memory.arena import Arena
from weft.memory.host_slab import HostSlab


class PageMover:
    """Carries out what a plan says about pages, in the order of the steps' own work.

    Args:
        arena: The device pages.
        slab: The host pages; pinned where the device is a GPU.
    """

    def __init__(self, arena: Arena, slab: HostSlab) -> None:
        self._arena = arena
        self._slab = slab
        self._is_gpu = arena.device.type == "cuda"

    def check(self, plan: StepPlan) -> None:
        """Verify that the plan's pages exist.

        Raises:
            PageAccountingError: One does not, or the zero page would be written.
        """
        moves = plan.swap_out + plan.swap_in
        device_pages = [move.device_page for move in moves]
        device_pages += [page for copy in plan.copies for page in (copy.source, copy.target)]
        _check(plan.zero_pages + device_pages, 1, self._arena.num_pages, "page")
        _check((move.host_page for move in moves), 0, self._slab.num_pages, "host page")

    def carry_out(self, plan: StepPlan) -> torch.cuda.Event | None:
        """Move the pages.

        Returns:
            What to wait for before host pages are used by anybody else; None when they can be at once.
        """
        device, host = self._arena.bytes, self._slab.pages
        for move in plan.swap_out:
            host[move.host_page].copy_(device[move.device_page], non_blocking=self._is_gpu)
        self._arena.zero(plan.zero_pages)
        for move in plan.swap_in:
            device[move.device_page].copy_(host[move.host_page], non_blocking=self._is_gpu)
        for copy in plan.copies:
            device[copy.target].copy_(device[copy.source])
        if not self._is_gpu or not (plan.swap_out or plan.swap_in):
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._arena.device))
        return event


def _check(pages: Iterable[int], first: int, end: int, name: str) -> None:
    wrong = [page for page in pages if not first <= page < end]
    if wrong:
        raise PageAccountingError(f"a plan names {name} {wrong[0]}, which is not one of {first} to {end - 1}")
