"""The second model runner's adapter, otherwise for accelerators: its real class, here, with real requests.

Once with the installed vLLM, and once with the interface of the next version, from the sources in its wheel.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import vllm_adapter_run
from vllm_caches import PATIENT

from benchmarks.parts import Parts
from benchmarks.vllm_served import ENVIRONMENT

BASES = [f"vllm.distributed.ec_transfer.ec_connector.{module}" for module in ("base", "factory", "metrics", "utils")]
NEXT = Path(sys.prefix) / "vllm-0.33.0"


def run(model: str, cluster: Parts, sources: str, tenant: str) -> dict[str, Any]:
    extra = json.dumps({**PATIENT, "config": str(cluster.config), "tenant": tenant})
    done = subprocess.run(
        [sys.executable, vllm_adapter_run.__file__, model, extra, sources],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("version", ["installed", "next"])
def test_the_adapter_publishes_what_is_encoded_and_loads_it_again(model, cluster: Parts, version: str) -> None:
    if version == "next" and not NEXT.is_dir():
        pytest.skip(f"{NEXT.name}'s sources could not be had")
    said = run(model("vision"), cluster, "-" if version == "installed" else str(NEXT), f"adapter-{version}")
    if version == "next":
        assert said["version"] == "0.33.0"
        assert {*BASES, "vllm.v1.worker.gpu.ec_connector"} <= set(said["stand_ins"])
    assert said["differences"] == []
    assert said["faults"] == []
    assert sorted(said["encoded_first"]) == ["one", "two"]
    assert said["encoded_in_all"][2:] == ["three"]
    assert said["loaded"] == {"one": True, "two": True}
    frees, params = said["told"]
    assert frees is False
    assert sorted(params) == ["one", "two"]
    assert params["one"]["item_indices"] == [0, 2]
    assert said["counts"]["published.stored"] == 3
    assert sum(value for name, value in said["counts"].items() if name.startswith("hit")) == 2
