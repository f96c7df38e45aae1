"""Manylora serves many LoRA adapters over one base model that stays on the device.

The parts are folders at the top of the repository, and are imported from here: `manylora.engine`, `manylora.adapters`
and so on. `manylora.LLM` is the engine in the caller's process, `manylora.Client` the client of a server's own API.
Each is loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from manylora.errors import ClientError

if TYPE_CHECKING:
    from manylora.client import Client as Client
    from manylora.engine.llm import LLM as LLM
    from manylora.engine.sampling_params import SamplingParams as SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "Client", "ClientError", "SamplingParams", "__version__"]


_MODULES = {
    "LLM": "manylora.engine.llm",
    "Client": "manylora.client",
    "SamplingParams": "manylora.engine.sampling_params",
}


def __getattr__(name: str) -> Any:  # noqa: ANN401 - the module protocol (PEP 562)
    if name not in _MODULES:
        raise AttributeError(f"module 'manylora' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
