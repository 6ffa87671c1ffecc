"""Two vLLM engines that share what they encode: see README.md beside this file."""

from __future__ import annotations

import argparse
import base64
import functools
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import requests
from PIL import Image

START_SECONDS = 900.0


def picture(size: int = 336) -> str:
    """A picture of this moment, which nobody has encoded yet, as a data URL."""
    file = io.BytesIO()
    Image.frombytes("RGB", (8, 8), os.urandom(192)).resize((size, size)).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def figures(port: int) -> list[str]:
    """What the engine's connector has counted."""
    lines = requests.get(f"http://127.0.0.1:{port}/metrics", timeout=30).text.splitlines()
    return [
        re.sub(r'vllm:mmcache_ec_|_total|(engine|model_name)="[^"]*",?|\{\}', "", line)
        for line in lines
        if line.startswith("vllm:mmcache_ec_") and "_total" in line and not line.endswith(" 0.0")
    ]


def wait_for(what: str, ready: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        if process.poll() is not None:
            raise SystemExit(f"{what} ended with status {process.returncode}")
        try:
            if ready():
                return
        except requests.RequestException:
            pass
        if time.monotonic() > deadline:
            raise SystemExit(f"{what} does not serve after {START_SECONDS:.0f} s")
        time.sleep(0.5)


def answers(url: str) -> bool:
    """Whether a server is up."""
    return requests.get(url, timeout=5).ok


def main() -> None:
    arguments = sys.argv[1:]
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description=__doc__, usage="%(prog)s [options] model [-- options of vllm serve]")
    parser.add_argument("model")
    parser.add_argument("--disaggregated", action="store_true", help="an encoder instance, and one that prefills")
    parser.add_argument("--port", type=int, default=8100, help="of the first engine; the second has the next")
    given, rest = parser.parse_args(arguments[:split]), arguments[split + 1 :]
    roles = ("ec_producer", "ec_consumer") if given.disaggregated else ("ec_both", "ec_both")
    children: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="mmcache-example-") as folder:
        try:
            config = Path(folder) / "client.yaml"
            up = [sys.executable, "-m", "mmcache.cli", "up", "--state-dir", folder]
            children.append(subprocess.Popen(up, start_new_session=True))
            wait_for("the cluster", config.exists, children[-1])
            for number, role in enumerate(roles):
                port = given.port + number
                ec = {
                    "ec_connector": "MMCacheECConnector",
                    "ec_role": role,
                    "ec_connector_extra_config": {"config": str(config)},
                }
                command = [str(Path(sys.executable).with_name("vllm")), "serve", given.model, *rest]
                command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "model"]
                command += ["--ec-transfer-config", json.dumps(ec)]
                children.append(subprocess.Popen(command, start_new_session=True))
            for number, child in enumerate(children[1:]):
                health = f"http://127.0.0.1:{given.port + number}/health"
                wait_for(f"engine {number + 1}", functools.partial(answers, health), child)
            show(given.port, disaggregated=given.disaggregated)
        finally:
            for child in reversed(children):
                child.send_signal(signal.SIGINT)
            for child in reversed(children):
                try:
                    child.wait(30)
                except subprocess.TimeoutExpired:
                    child.kill()


def show(port: int, *, disaggregated: bool) -> None:
    image = {"type": "image_url", "image_url": {"url": picture()}}
    params: dict[str, Any] = {}
    for number, name in enumerate(("first", "second")):
        text = [] if disaggregated and number == 0 else [{"type": "text", "text": "What is this?"}]
        body: dict[str, Any] = {
            "model": "model",
            "messages": [{"role": "user", "content": [image, *text]}],
            "max_tokens": 1 if disaggregated and number == 0 else 16,
            "temperature": 0,
            **({"ec_transfer_params": params} if params else {}),
        }
        started = time.monotonic()
        url = f"http://127.0.0.1:{port + number}/v1/chat/completions"
        response = requests.post(url, json=body, timeout=600)
        response.raise_for_status()
        answer = response.json()
        took = time.monotonic() - started
        params = answer.get("ec_transfer_params") or {}
        if number == 0:
            time.sleep(2)  # published in the background
        print(f"the {name} engine answered in {took:.2f} s: {answer['choices'][0]['message']['content']!r}", flush=True)
    time.sleep(11)  # vLLM passes figures on every ten seconds
    for number, name in enumerate(("first", "second")):
        print(f"the {name} engine: {'; '.join(figures(port + number)) or 'nothing counted'}", flush=True)


if __name__ == "__main__":
    main()
