"""The deduplication benchmark runs, and what it says of a small load is right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_each_key_that_is_asked_for_is_computed_once(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    options = ["--processes", "2", "--keys", "12", "--requests", "8", "--bytes", "64KiB", "--compute-ms", "1"]
    command = [sys.executable, "-m", "benchmarks.dedup", *options, "--batch", "4", "--runs", "3", "--json", str(out)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    figures = json.loads(out.read_text())
    assert figures["shared"]["computed"] == figures["distinct"]
    assert figures["distinct"] < figures["private"]["computed"] < figures["asked"] == 2 * (4 + 1) * 4
    kinds = {kind: row["embeddings"] for kind, row in figures["shared"]["kinds"].items()}
    assert kinds["computed"] == figures["distinct"]
    for handover in figures["handover"].values():
        assert handover["rounds"] == 3
        assert handover["commit_to_held_ms"] > handover["to_read_ms"] > 0
    assert "a key" in ran.stdout
