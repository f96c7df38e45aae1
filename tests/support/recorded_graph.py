"""Stands for a CUDA graph on a CPU: records the kernels and torch operations of a function, and runs them again.

As in a graph, nothing of the function itself runs again: each operation gets the very tensors and numbers that it got
when it was recorded. Memory that is handed out uninitialised holds NaN in each run. Needs Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction

Operation = Callable[[], None]
EMPTY = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")
ASKS = ("_local_scalar_dense", "nonzero", "item", "equal")
"""Operations whose result the host waits for."""


class RecordedGraph:
    """What one function launched."""

    def __init__(self, launch: Callable[[], None]) -> None:
        self.operations: list[Operation] = []
        self.num_launches = 0
        recorder = _Recorder(self.operations)
        run = InterpretedFunction.run

        def recorded(
            kernel: InterpretedFunction, *args: Any, grid: Any, warmup: bool, **named: Any
        ) -> Any:
            def again() -> None:
                run(kernel, *args, grid=grid, warmup=warmup, **named)

            with recorder.paused():
                again()
            self.operations.append(again)
            self.num_launches += 1

        InterpretedFunction.run = recorded
        try:
            with recorder:
                launch()
        finally:
            InterpretedFunction.run = run

    def replay(self) -> None:
        """Run all of it again."""
        for operation in self.operations:
            operation()


def capture(launch: Callable[[], None]) -> Callable[[], None]:
    """As `manylora.engine.execution.step_program.Capture`."""
    return RecordedGraph(launch).replay


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, operations: list[Operation]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operations = operations
        self._is_paused = False

    def paused(self) -> _Pause:
        return _Pause(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        out = func(*args, **named)
        if not self._is_paused:
            self._record(func, args, named, out)
        return out

    def _record(self, func: Any, args: Any, named: Any, out: Any) -> None:
        name = func.overloadpacket.__name__
        if name in ASKS:
            raise AssertionError(f"{name} asks the device while a graph is recorded")
        if name in EMPTY:
            self._operations.append(lambda: _poison(out))
            _poison(out)
            return
        returns = func._schema.returns
        aliases = [each.alias_info for each in returns]
        if any(alias is not None and not alias.is_write for alias in aliases):
            return  # a view of memory that stays where it is
        is_written = any(alias is not None for alias in aliases)

        def again() -> None:
            new = func(*args, **named)
            if not is_written:
                for old_part, new_part in zip(_parts(out), _parts(new), strict=True):
                    old_part.copy_(new_part)

        self._operations.append(again)


class _Pause:
    def __init__(self, recorder: _Recorder) -> None:
        self._recorder = recorder

    def __enter__(self) -> None:
        self._recorder._is_paused = True

    def __exit__(self, *_: object) -> None:
        self._recorder._is_paused = False


def _parts(out: Any) -> tuple[torch.Tensor, ...]:
    return (out,) if isinstance(out, torch.Tensor) else tuple(out)


def _poison(tensor: torch.Tensor) -> None:
    tensor.fill_(
        float("nan") if tensor.is_floating_point() else -77 if tensor.dtype != torch.uint8 else 77
    )
