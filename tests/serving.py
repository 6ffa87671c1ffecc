"""A real cluster for the client's tests: a store of real processes, a real controller, and a client.yaml."""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from cluster import NO_VARIABLES, MooncakeProcesses, Owner, free_port, wait_until

from mmcache import EmbeddingKey, MMCache
from mmcache.key import store_name
from mmcache.store.base import Outcome, Store
from mmcache.store.launch import port_answers

NO_SECTIONS: Mapping[str, Any] = {}
WORKER = Path(__file__).parent / "client" / "worker.py"


def key_of(number: int | str, **fields: str) -> EmbeddingKey:
    return EmbeddingKey(**{"model": "encoder", "version": "1", "mm_hash": f"item-{number}", **fields})


def store_of(cache: MMCache) -> Store:
    """The store that a cache is attached to, for tests that read it raw, or replace one of its methods."""
    return cache._attacher.require().store


def name_of(cache: MMCache, key: EmbeddingKey, generation: int = 0) -> str:
    """The name that an entry has in the store, at first and before any invalidation."""
    view = cache._channel.fresh()
    assert view is not None
    return store_name(key, lineage=view.lineage, generation=generation)


def plant(cache: MMCache, key: EmbeddingKey, content: bytes | bytearray) -> None:
    """Put any bytes at all under an entry's name; no controller hears of it."""
    store, pool = cache._attacher.require()
    block = pool.allocate(len(content), deadline=0.0)
    ctypes.memmove(block.address, bytes(content), len(content))
    [result] = store.put_from([name_of(cache, key)], [block.address], [len(content)], deadline=1e12)
    assert result.outcome is Outcome.OK
    pool.release(block)


def raw_object(cache: MMCache, key: EmbeddingKey) -> bytes:
    """All bytes of an entry's object, as the store has them."""
    store, pool = cache._attacher.require()
    [nbytes] = store.sizes([name_of(cache, key)], deadline=1e12)
    assert nbytes is not None
    block = pool.allocate(nbytes, deadline=0.0)
    [result] = store.read_into([name_of(cache, key)], [block.address], [nbytes], deadline=1e12)
    assert result.outcome is Outcome.OK
    content = ctypes.string_at(block.address, nbytes)
    pool.release(block)
    return content


class Controller:
    """One `mmcache controller` process on a port that stays the same when it is started again.

    Args:
        durable: whether it has a file for what is to outlive it.
        admin_tokens: the text of its token file; None: it has no admin API.
        sections: more of its settings.
    """

    def __init__(
        self,
        folder: Path,
        port: int,
        *,
        session_ttl: float,
        claim_timeout: float,
        durable: bool,
        admin_tokens: str | None = None,
        sections: Mapping[str, Any] = NO_SECTIONS,
    ) -> None:
        self.address = f"tcp://127.0.0.1:{port}"
        self.state = folder / "controller.db"
        self._config = folder / "controller.yaml"
        settings: dict[str, Any] = {
            "bind": self.address,
            "session_ttl": session_ttl,
            "claim_timeout": claim_timeout,
        }
        if durable:
            settings["state"] = str(self.state)
        if admin_tokens is not None:
            tokens = folder / "tokens.yaml"
            tokens.touch(mode=0o600)
            tokens.write_text(admin_tokens)
            settings |= {"admin": f"127.0.0.1:{free_port()}", "admin_tokens": str(tokens)}
            self.admin = f"http://{settings['admin']}"
        self._config.write_text(json.dumps({"controller": settings, **sections}))
        self.log = folder / "controller.log"
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "mmcache.cli", "controller", "-c", str(self._config)],
                stdout=log,
                stderr=log,
            )
        host_port = self.address.removeprefix("tcp://")
        wait_until(lambda: port_answers(host_port), timeout=90, what="the controller")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Serving:
    """A master, an owner that is the sidecar, and a controller; a context manager that ends them all.

    Args:
        segment_bytes: what the sidecar lends.
        remote_bytes: what `remote` lends, an owner that no client attaches to; 0: there is none.
        lease_ms: the store's read lease.
        master_options: for its command line.
        environment: for the sidecar, besides this process's.
        durable: whether the controller has a file for what is to outlive it.
        admin_tokens: the text of the controller's token file; None: it has no admin API.
        controller_store: settings of the store for the controller, besides where its master is.
        sections: more of the controller's settings.
    """

    remote: Owner
    """Only with `remote_bytes`."""

    def __init__(
        self,
        *,
        segment_bytes: int = 256 << 20,
        remote_bytes: int = 0,
        lease_ms: int = 10_000,
        master_options: tuple[str, ...] = (),
        environment: Mapping[str, str] = NO_VARIABLES,
        session_ttl: float = 2.0,
        claim_timeout: float = 3.0,
        durable: bool = False,
        admin_tokens: str | None = None,
        controller_store: Mapping[str, Any] = NO_SECTIONS,
        sections: Mapping[str, Any] = NO_SECTIONS,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="mmcache-test-")
        self.folder = Path(self._folder.name)
        self.store = MooncakeProcesses()
        self.store.start_master(lease_ms=lease_ms, options=master_options)
        self.sidecar: Owner = self.store.start_owner(segment_bytes, environment=environment)
        if remote_bytes:
            self.remote = self.store.start_owner(remote_bytes)
        self.controller = Controller(
            self.folder,
            free_port(),
            session_ttl=session_ttl,
            claim_timeout=claim_timeout,
            durable=durable,
            admin_tokens=admin_tokens,
            sections={"store": {"master": self.store.master.address, **controller_store}, **sections},
        )
        self.config = self.write_config("client.yaml")
        self._caches: list[MMCache] = []
        self._workers: list[Worker] = []

    def write_config(self, name: str, **store: str) -> Path:
        """A client's configuration; `store` overrides settings of that section."""
        path = self.folder / name
        path.write_text(
            json.dumps(
                {
                    "store": {"master": self.store.master.address, "sidecar": self.sidecar.address, **store},
                    "control": {"address": self.controller.address},
                    "client": {"pool_bytes": "32MiB"},
                }
            )
        )
        return path

    def connect(self, config: Path | None = None, *, attach: str = "auto", **client: Any) -> MMCache:
        """A cache that this cluster closes, attached to its store in one way (`auto`: as `config` says)."""
        if config is None and attach != "auto":
            config = self.write_config(f"client-{attach}.yaml", attach=attach)
        cache = MMCache.connect(config or self.config, **client)
        self._caches.append(cache)
        assert attach == "auto" or store_of(cache).kind == attach
        return cache

    def close_caches(self) -> None:
        """Close all that were connected here. Idempotent."""
        for cache in self._caches:
            cache.close()
        self._caches.clear()

    def start_worker(self, task: str, *, attach: str = "auto", **arguments: Any) -> Worker:
        worker = Worker(self.config, task, attach, arguments)
        self._workers.append(worker)
        return worker

    def is_in_progress(self, name: str) -> bool:
        """Whether somebody's put of this name has begun and not ended, dead or alive."""
        with closing(http.client.HTTPConnection(self.store.metrics, timeout=5)) as connection:
            connection.request("GET", f"/batch_query_keys?keys={name}")
            return b"REPLICA_IS_NOT_READY" in connection.getresponse().read()

    def __enter__(self) -> Serving:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        for worker in self._workers:
            worker.kill()
        self.close_caches()
        self.controller.kill()
        if kind is not None:
            print(self.controller.log.read_text()[-4000:], file=sys.stderr)
        self.store.__exit__(kind)
        self._folder.cleanup()


class Worker:
    """A process that runs one task of worker.py; it writes a JSON object a line."""

    def __init__(self, config: Path, task: str, attach: str, arguments: dict[str, Any]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER), task, json.dumps(arguments)],
            env={**os.environ, "MMCACHE_CONFIG": str(config), "MMCACHE_STORE__ATTACH": attach},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def read(self) -> dict[str, Any]:
        """The next line that it writes."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the worker ended with {self.process.wait()}"
        return json.loads(line)

    def go(self) -> None:
        """Let it go on from where it waits for a line."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def finish(self, timeout: float = 120.0) -> dict[str, Any]:
        """Its last line, once it has ended well."""
        out, _ = self.process.communicate(timeout=timeout)
        assert self.process.returncode == 0, f"the worker ended with {self.process.returncode}"
        return json.loads(out.splitlines()[-1])

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()
