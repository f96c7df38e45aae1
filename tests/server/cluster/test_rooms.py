"""What one role needs, others do not import: each process pays for its imports in memory and in time to start."""

from __future__ import annotations

import json
import subprocess
import sys


def imported_by(*modules: str) -> set[str]:
    """Modules that a fresh process has after importing these."""
    program = f"import json, sys, {', '.join(modules)}; print(json.dumps(list(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], check=True, capture_output=True, text=True
    )
    return set(json.loads(done.stdout))


def test_a_server_alone_imports_nothing_of_many_servers() -> None:
    imported = imported_by("manylora.server.serve", "manylora.server.app")
    assert not {
        name for name in imported if name.startswith(("manylora.server.cluster", "aiohttp", "ray"))
    }


def test_a_gateway_imports_no_model() -> None:
    imported = imported_by("manylora.server.cluster.serve", "manylora.server.cluster.app")
    assert not imported & {
        "torch",
        "transformers",
        "tokenizers",
        "numpy",
        "llguidance",
        "zmq",
        "ray",
    }
