"""A process that ends while calls of the store hang ends at once and in order."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from serving import Serving

ENGINE = """
import sys, torch
from mmcache import EmbeddingKey, MMCache

cache = MMCache.connect(sys.argv[1], local_entries=False, pool_bytes=8 << 20)
keys = [EmbeddingKey("encoder", "1", f"{sys.argv[2]}-{number}") for number in range(5)]
assert cache.put(keys[0], torch.ones(1000)).readable
assert cache.get(keys[0]) is not None
print("ready", flush=True)
sys.stdin.readline()
for key in keys:
    cache.get(key, timeout=0.3)
    cache.put(key, torch.ones(1000), timeout=0.3)
if sys.argv[2].endswith("closes"):
    cache.close()
print("ends", flush=True)
"""


@pytest.mark.parametrize("ending", ["closes", "ends"])
@pytest.mark.parametrize("attach", ["sidecar", "embedded"])
@pytest.mark.parametrize("part", ["sidecar", "master"])
def test_a_process_ends_in_order_though_its_calls_hang(
    fresh_serving: Serving, part: str, attach: str, ending: str
) -> None:
    config = fresh_serving.write_config(f"{attach}.yaml", attach=attach)
    engine = subprocess.Popen(
        [sys.executable, "-c", ENGINE, str(config), f"{part}-{attach}-{ending}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ.copy(),
    )
    try:
        assert engine.stdout is not None
        assert engine.stdout.readline() == "ready\n"
        stopped = {"master": fresh_serving.store.master, "sidecar": fresh_serving.sidecar}[part]
        with stopped.stopped():
            started = time.monotonic()
            output, _ = engine.communicate("go\n", timeout=60)
            assert output == "ends\n"
            assert engine.returncode == 0
            assert time.monotonic() - started < 25.0, "Mooncake's own exit handler waits for half a minute"
    finally:
        engine.kill()
        engine.wait()


FORKS = """
import os, sys, torch
from mmcache import EmbeddingKey, MMCache

cache = MMCache.connect(sys.argv[1], pool_bytes=8 << 20)
assert cache.put(EmbeddingKey("encoder", "1", sys.argv[2]), torch.ones(1000), timeout=20).readable
child = os.fork()
if not child:
    sys.exit(7)
print(child, flush=True)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.mark.parametrize("attach", ["sidecar", "embedded"])
def test_a_forked_child_ends_with_its_own_status(serving: Serving, attach: str) -> None:
    config = serving.write_config(f"{attach}.yaml", attach=attach)
    command = [sys.executable, "-c", FORKS, str(config), f"forks-{attach}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ.copy()) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            output, _ = parent.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            os.kill(child, signal.SIGKILL)
            raise
        assert (output, parent.returncode) == ("7\n", 0)
