"""The program that renders chats in a process with limits: `python -P -m manylora.server.sandbox.chat_worker`."""

from __future__ import annotations

import logging
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from manylora.engine.text.tokenizer import ChatTemplate
from manylora.errors import InvalidRequestError
from manylora.server.sandbox.worker import Answer, answer_jobs, read_setup

MEMORY_BYTES = 256 << 20


def renderer(template: dict[str, Any]) -> Answer:
    """Make what answers jobs for a chat template: the `text` of a chat, or why it is `refused`."""
    made = ChatTemplate(**template)

    def answer(job: dict[str, Any]) -> dict[str, str | None]:
        try:
            return {"text": made.render(**job)}
        except InvalidRequestError as error:
            return {"refused": error.message, "code": error.code}

    return answer


def import_templates() -> None:
    """Import what renders templates, before this process forks: 0.2 s of CPU where all of transformers takes 0.6.

    The packages that it is in stay empty. A version of transformers that needs more of them is imported whole.
    """
    sys.modules["torch"] = None  # type: ignore[assignment]  # it takes seconds and is not needed
    logging.getLogger("transformers").setLevel(logging.ERROR)
    found = find_spec("transformers")
    folder = Path(found.origin).parent if found and found.origin else Path()
    for name, path in (("transformers", folder), ("transformers.utils", folder / "utils")):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [str(path)]
    try:
        import transformers.utils.chat_template_utils
    except ImportError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
            del sys.modules[name]
        import transformers.utils.chat_template_utils  # noqa: F401


if __name__ == "__main__":
    import_templates()
    answer_jobs(partial(renderer, read_setup()), MEMORY_BYTES)
