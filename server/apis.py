"""The APIs whose routes have facts. Importing this declares the facts, and imports neither engine nor tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import cast

from fastapi import APIRouter

from manylora.server import generation, messages, responses, vllm
from manylora.server.http.route_facts import ROUTES, RouteFacts

GENERATING = (generation, responses, messages)
"""Each is a folder: its `__init__.py` declares facts, its `routes.py` has the router. One more is a name here."""
CONTROLLING = (vllm,)
"""Folders with routes that steer the engine."""
FACTS: Mapping[str, RouteFacts] = ROUTES
"""Facts of routes by path, of all these folders."""


def router_of(api: ModuleType) -> APIRouter:
    """The routes of an API; this imports what serves them."""
    return cast(APIRouter, import_module(f"{api.__name__}.routes").router)
