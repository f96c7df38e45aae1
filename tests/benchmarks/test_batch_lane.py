from __future__ import annotations

import json
from pathlib import Path

from weft.benchmarks.batch_lane import main


def test_a_load_is_measured_alone_and_beside_a_batch(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    arguments = ["--set", "memory.gib=0.05", "--set", "memory.host_gib=0.05", "--set", "model.threads=1"]
    arguments += ["--copies", "2", "--requests", "4", "--output-tokens", "4", "--lines", "6", "--line-tokens", "3"]
    assert main([*arguments, "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    assert (result["batch"]["total"], result["batch"]["completed"], result["batch"]["failed"]) == (6, 6, 0)
    assert [row[""] for row in result["table"]] == ["alone", "beside"]
    assert result["table"][1]["TTFT p95, ms"] > 0
