"""The benchmark of the controller, at a size that says nothing of speed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_it_reports_every_mix_beside_its_baseline(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    sizes = [
        "--runs",
        "1",
        "--requests",
        "40",
        "--clients",
        "2",
        "--window",
        "2",
        "--entries",
        "2000",
        "--seconds",
        "0.2",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.control", *sizes, "--json", str(figures)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(figures.read_text())
    assert [row["mix"] for row in told["mixes"]] == ["hits", "grants", "mixed", "lookup"]
    for row in told["mixes"]:
        assert min(row["per_s"], row["baseline_per_s"], row["p99_us"], row["baseline_p99_us"]) > 0
    assert told["wait"]["p50_us"] <= told["wait"]["p99_us"]
    assert told["memory"]["entries"] == 2000
    assert "mixed" in done.stdout
