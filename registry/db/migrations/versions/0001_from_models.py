"""The first revision of the history. Nothing leads to it: an empty database is made from the models."""

from __future__ import annotations

revision = "0001"
down_revision = None
