"""Collects everything that is wrong with an adapter. Its owner gets one list, not one error per upload.

A check refuses a field, a tensor or a pair of tensors by raising. `attempt` notes the error, and the caller goes on. If
a file cannot be read any further, the error ends the whole outer `attempt`. The list is bounded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn, ParamSpec, TypeVar

from manylora.errors import AdapterError, AdapterFormatError, AdapterIncompatibleError, Finding

MAX_FINDINGS = 20
MAX_ALSO = 3
"""Largest number of names that a finding lists beside the first."""
MAX_MESSAGE = 360
"""Largest message, in characters, of every finding but the first."""
MAX_NAME = 96

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def refuse(code: str, message: str, param: str | None, hint: str) -> NoReturn:
    """Refuse something that neither PEFT nor MLX writes."""
    raise AdapterFormatError(message, code=code, param=param, hint=hint)


def refuse_unsupported(code: str, message: str, param: str, hint: str) -> NoReturn:
    """Refuse something that is sound but not served here."""
    raise AdapterIncompatibleError(message, code=code, param=param, hint=hint)


class Findings:
    """Findings in the order in which they were found.

    Findings with the same code and hint are listed as one, with the names of the others.
    """

    def __init__(self) -> None:
        self.seen = 0
        """Number of findings, listed or not."""
        self._class: type[AdapterError] = AdapterError
        self._listed: dict[tuple[str, str], tuple[Finding, list[str]]] = {}
        self._noted: set[tuple[str, str]] = set()
        self._unlisted = 0

    @property
    def params(self) -> set[str]:
        """Fields and tensors with a finding."""
        return {param for _, param in self._noted}

    def attempt(
        self, check: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result | None:
        """Return the result of `check`. If it refuses, note the error and return None."""
        try:
            return check(*args, **kwargs)
        except AdapterError as error:
            self.note(error)
            return None

    def note(self, error: AdapterError) -> None:
        """Add a finding."""
        self.seen += 1
        finding = error.finding
        if finding.param is not None:
            if (finding.code, finding.param) in self._noted:
                return
            self._noted.add((finding.code, finding.param))
        key = (finding.code, finding.hint)
        if key in self._listed:
            self._listed[key][1].append(_cut(finding.param or "another", MAX_NAME))
        elif len(self._listed) < MAX_FINDINGS:
            self._class = self._class if self._listed else type(error)
            self._listed[key] = (finding, [])
        else:
            self._unlisted += 1

    def passed(self, result: Result | None) -> Result:
        """Return `result` if nothing is wrong.

        Raises:
            AdapterError: Something is wrong. The class is that of the first finding; the error has all findings.
        """
        if result is None or self._listed:
            raise self._class.of(self._findings())
        return result

    def _findings(self) -> list[Finding]:
        found = [
            replace(first, message=first.message + _also(names))
            for first, names in self._listed.values()
        ]
        found[1:] = map(_bounded, found[1:])
        if self._unlisted:
            more = f" Beside these, {self._unlisted} things are wrong that are not listed."
            found[-1] = replace(found[-1], message=found[-1].message + more)
        return found


def _also(names: list[str]) -> str:
    if not names:
        return ""
    shown = (
        names
        if len(names) <= MAX_ALSO
        else [*names[: MAX_ALSO - 1], f"{len(names) - MAX_ALSO + 1} more"]
    )
    return (
        f" The same is wrong with {' and '.join(filter(None, (', '.join(shown[:-1]), shown[-1])))}."
    )


def _bounded(finding: Finding) -> Finding:
    param = None if finding.param is None else _cut(finding.param, MAX_NAME)
    return replace(finding, message=_cut(finding.message, MAX_MESSAGE), param=param)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."
