"""`vllm serve` as a child: started with any encoder-cache connector, asked over HTTP, ended with all its processes."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil

from benchmarks.parts import free_ports
from benchmarks.vllm_media import Medium
from benchmarks.vllm_probe import CLASS as PROBE
from mmcache.config import without_settings

ROOT = Path(__file__).parents[1]
START_SECONDS = 600.0
ANSWER_SECONDS = 120.0
MODEL_NAME = "tiny"
ENVIRONMENT: Mapping[str, str] = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # for collective_rpc, and to reset its caches
    "PYTHONPATH": str(ROOT),
}
DEFAULTS: Mapping[str, Any] = {
    "dtype": "bfloat16",
    "load_format": "safetensors",
    "generation_config": "vllm",
    "enforce_eager": True,
    "enable_prefix_caching": False,
    "kv_cache_memory_bytes": 64 << 20,
    "max_model_len": 1024,
    "max_num_batched_tokens": 1024,
    "max_num_seqs": 4,
    "limit_mm_per_prompt": {"image": 8, "video": 2},
    "worker_extension_cls": PROBE,
}
"""Arguments of an engine, under their names in Python."""
_EVERYWHERE = ("engine=", "model_name=")
"""Labels of all metrics."""
CONNECTORS = {
    "mmcache": ("MMCacheECConnector", "mmcache.integrations.vllm.connector"),
    "timed": ("TimedConnector", "benchmarks.vllm_timed"),
    "example": ("ECExampleConnector", "vllm.distributed.ec_transfer.ec_connector.example_connector"),
}


class Options(msgspec.Struct, frozen=True):
    """One engine.

    Args:
        model: folder of the model, also its `--model` string.
        connector: one of `CONNECTORS`, or none.
        extra: `ec_connector_extra_config`.
        arguments: of the engine, besides `DEFAULTS`.
        environment: besides `ENVIRONMENT`.
        by_name: the connector is found by its plugin's entry point alone.
    """

    model: str
    connector: str | None = None
    role: str = "ec_both"
    extra: dict[str, Any] = {}
    arguments: dict[str, Any] = {}
    environment: dict[str, str] = {}
    by_name: bool = False

    def all_arguments(self) -> dict[str, Any]:
        """What its engine is to be made with."""
        arguments = {**DEFAULTS, **self.arguments}
        if self.connector is not None:
            name, module = CONNECTORS[self.connector]
            arguments["ec_transfer_config"] = {
                "ec_connector": name,
                "ec_role": self.role,
                "ec_connector_extra_config": self.extra,
            } | ({} if self.by_name else {"ec_connector_module_path": module})
        return arguments

    def all_environment(self) -> dict[str, str]:
        """What its processes are to be started with."""
        return {**without_settings(os.environ), **ENVIRONMENT, **self.environment}


class Answer(msgspec.Struct, frozen=True):
    """What became of one request: `tokens` if it was answered, else `error`."""

    tokens: list[int] = []
    error: str = ""
    ec_transfer_params: dict[str, Any] | None = None
    seconds: float = 0.0
    first_seconds: float = 0.0
    """When the first token was there."""


class EngineFailed(RuntimeError):
    """It did not start, or has ended."""


class ServedEngine:
    """A running `vllm serve`; a context manager that ends it.

    Attributes:
        log: what it writes.
        said: what it had written when it was ended.
    """

    def __init__(self, options: Options, *, name: str = "engine", folder: Path | None = None) -> None:
        self._temporary = None if folder else tempfile.TemporaryDirectory(prefix="mmcache-vllm-")
        directory = folder or Path(self._temporary.name if self._temporary else "")
        [self.port] = free_ports(1)
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", options.model]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", MODEL_NAME]
        command += _flags(options.all_arguments())
        self.log = directory / f"{name}.log"
        with self.log.open("wb") as output:
            self._keeper = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.vllm_keeper", *command],
                cwd=directory,
                env=options.all_environment(),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.said = ""
        self._processes: dict[int, psutil.Process] = {}

    def wait_ready(self, timeout: float = START_SECONDS) -> None:
        """Return when it serves. Raises EngineFailed when it ends, or does not serve within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while not self._is_healthy():
            if self._keeper.poll() is not None or time.monotonic() > deadline:
                state = "does not serve" if self._keeper.poll() is None else f"ended with {self._keeper.returncode}"
                raise EngineFailed(f"vllm serve {state}\n{self.log.read_text(errors='replace')[-8000:]}")
            time.sleep(0.1)
        self.rpc("probe_install")

    @property
    def url(self) -> str:
        """Where it serves."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def processes(self) -> list[psutil.Process]:
        """That of `vllm serve`, and all those that it started."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self._keeper.pid).children(recursive=True):
                self._processes[process.pid] = process
        return [process for process in self._processes.values() if process.is_running()]

    @property
    def agent(self) -> psutil.Process:
        """The process that has mmcache's client."""
        return agent_among(self.processes)

    def chat(
        self,
        *parts: Medium | str,
        max_tokens: int = 8,
        uuids: Sequence[str | None] = (),
        ec_transfer_params: dict[str, Any] | None = None,
        timeout: float = ANSWER_SECONDS,
        **fields: Any,
    ) -> Answer:
        """One greedy request; `uuids` are those of its media in order, `fields` go into its body."""
        with self.begin(
            *parts,
            max_tokens=max_tokens,
            uuids=uuids,
            ec_transfer_params=ec_transfer_params,
            timeout=timeout,
            **fields,
        ) as exchange:
            return exchange.answer()

    def begin(
        self,
        *parts: Medium | str,
        max_tokens: int = 8,
        uuids: Sequence[str | None] = (),
        ec_transfer_params: dict[str, Any] | None = None,
        timeout: float = ANSWER_SECONDS,
        **fields: Any,
    ) -> Exchange:
        """Send a request; its answer is read from what this returns, whose `close` is a client that goes away."""
        body = {
            "model": MODEL_NAME,
            "messages": [{"role": "user", "content": content(parts, uuids)}],
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
            **fields,
        }
        if ec_transfer_params is not None:
            body["ec_transfer_params"] = ec_transfer_params
        return Exchange(self.port, "/v1/chat/completions", body, timeout)

    def rpc(self, method: str, *arguments: str) -> list[Any]:
        """What a method of each worker returns."""
        status, said = self._ask("POST", "/collective_rpc", {"method": method, "args": arguments})
        if status != 200:
            raise EngineFailed(f"{method}: {status} {said}")
        return list(json.loads(said)["results"]) if said else []

    def post(self, path: str, body: object = None) -> None:
        """One of its other endpoints. Raises EngineFailed unless the status is 200."""
        status, said = self._ask("POST", path, body)
        if status != 200:
            raise EngineFailed(f"{path}: {status} {said}")

    def encoded(self) -> int:
        """How many items this engine has really encoded."""
        return int(sum(worker["items"] for worker in self.rpc("probe_encoder")[:1]))

    def reset(self) -> None:
        """Empty vLLM's own caches: of embeddings, prefixes and processed pictures."""
        self.post("/reset_prefix_cache")
        self.reset_encoder()
        self.reset_processor()

    def reset_encoder(self) -> None:
        """Empty its cache of embeddings."""
        self.post("/reset_encoder_cache")

    def reset_processor(self) -> None:
        """Empty its cache of processed pictures."""
        self.post("/reset_mm_cache")

    def metrics(self) -> dict[str, float]:
        """Its Prometheus metrics by name, summed over labels; buckets are left out."""
        return sums(self._ask("GET", "/metrics")[1])

    @property
    def is_alive(self) -> bool:
        """Whether it still serves."""
        return self._keeper.poll() is None and self._is_healthy()

    def end(self, *, gracefully: bool = False) -> None:
        """End it and all of its processes; idempotent."""
        processes = self.processes
        if gracefully and processes:
            processes[0].terminate()
            psutil.wait_procs(processes, timeout=60)
        end_all(processes)
        if self._keeper.stdin is not None:
            self._keeper.stdin.close()
        self._keeper.wait()
        if self.log.exists():
            self.said = self.log.read_text(errors="replace")
        if self._temporary is not None:
            self._temporary.cleanup()

    def __enter__(self) -> ServedEngine:
        try:
            self.wait_ready()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _is_healthy(self) -> bool:
        with contextlib.suppress(OSError, http.client.HTTPException):
            return self._ask("GET", "/health", timeout=10.0)[0] == 200
        return False

    def _ask(self, method: str, path: str, body: object = None, *, timeout: float = ANSWER_SECONDS) -> tuple[int, str]:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)) as connection:
            text = None if body is None else json.dumps(body)
            connection.request(method, path, text, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read().decode(errors="replace")


class Exchange:
    """One request that was sent; a context manager that closes its connection."""

    def __init__(self, port: int, path: str, body: dict[str, Any], timeout: float) -> None:
        self._streams = bool(body.get("stream"))
        text = json.dumps(body)
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
        self._started = time.monotonic()
        self._connection.request("POST", path, text, {"Content-Type": "application/json"})

    def answer(self) -> Answer:
        """Wait for it. A status other than 200, and an engine that is gone, are errors in the answer."""
        try:
            response = self._connection.getresponse()
            if response.status == 200 and self._streams:
                return self._streamed(response)
            said = response.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            return Answer(error=repr(error), seconds=self._elapsed())
        if response.status != 200:
            return Answer(error=f"{response.status}: {said}", seconds=self._elapsed())
        answer = json.loads(said)
        return Answer(
            tokens=answer["choices"][0]["token_ids"],
            ec_transfer_params=answer.get("ec_transfer_params"),
            seconds=self._elapsed(),
        )

    def close(self) -> None:
        """Go away, answered or not."""
        self._connection.close()

    def __enter__(self) -> Exchange:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _streamed(self, response: http.client.HTTPResponse) -> Answer:
        tokens: list[int] = []
        first = 0.0
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                return Answer(error=str(event["error"]), seconds=self._elapsed())
            for choice in event["choices"]:
                new = choice.get("token_ids") or []
                if new and not tokens:
                    first = self._elapsed()
                tokens += new
        return Answer(tokens=tokens, seconds=self._elapsed(), first_seconds=first)

    def _elapsed(self) -> float:
        return time.monotonic() - self._started


def content(parts: Sequence[Medium | str], uuids: Sequence[str | None] = ()) -> list[dict[str, Any]]:
    """A message's content for the chat API."""
    named = iter(uuids)
    described: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, str):
            described.append({"type": "text", "text": part})
            continue
        uuid = next(named, None)
        described.append(part.part() | ({} if uuid is None else {"uuid": uuid}))
    return described


def sums(text: str) -> dict[str, float]:
    """Prometheus' text without buckets: by name, summed over labels, and by name and each label of the metric's own,
    as in `vllm:mmcache_ec_misses_total{reason="absent"}`.
    """
    found: dict[str, float] = {}
    for name, labels, value in re.findall(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)$", text, re.MULTILINE):
        if name.endswith("_bucket"):
            continue
        own = [label for label in re.findall(r'\w+="[^"]*"', labels) if not label.startswith(_EVERYWHERE)]
        for key in (name, *(f"{name}{{{label}}}" for label in own)):
            found[key] = found.get(key, 0.0) + float(value)
    return found


def agent_among(processes: Sequence[psutil.Process]) -> psutil.Process:
    """The one that is mmcache's agent."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if "mmcache.agent.process" in process.cmdline():
                return process
    raise EngineFailed("the engine has no agent")


def end_all(processes: Sequence[psutil.Process]) -> None:
    """SIGKILL, stopped or not, and wait until they are gone."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    psutil.wait_procs(processes, timeout=30)


def _flags(arguments: Mapping[str, Any]) -> list[str]:
    flags: list[str] = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", json.dumps(value) if isinstance(value, dict | list) else str(value)]
    return flags
