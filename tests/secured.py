"""A controller with keys, beside the store of a real cluster, and clients with keys of all kinds."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq
from cluster import free_port, wait_until
from serving import Serving

from mmcache.store.launch import port_answers

SESSION_TTL = 2.0
LONG = 120.0
"""Seconds for what takes a moment, unless the machine is busy."""


class Keys:
    """One pair, and the file of the secret one."""

    def __init__(self, folder: Path, name: str) -> None:
        public, secret = zmq.curve_keypair()
        self.public = public.decode()
        self.file = folder / f"{name}.secret"
        self.file.touch(mode=0o600)
        self.file.write_text(f"# {name}\n{secret.decode()}\n")


class Secured:
    """One `mmcache controller` process that takes `friend` alone.

    Args:
        serving: whose store clients use.
        folder: for its files.
    """

    def __init__(self, serving: Serving, folder: Path) -> None:
        self._serving = serving
        self._folder = folder
        self.address = f"tcp://127.0.0.1:{free_port()}"
        self.keys, self.friend, self.stranger = map(self.make_keys, ("controller", "friend", "stranger"))
        self.allowed = folder / "clients"
        self.allow()
        self.log = folder / "controller.log"
        settings = {
            "bind": self.address,
            "session_ttl": SESSION_TTL,
            "secret_key_file": str(self.keys.file),
            "client_keys_file": str(self.allowed),
        }
        config = folder / "controller.yaml"
        config.write_text(json.dumps({"controller": settings}))
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "mmcache.cli", "controller", "-c", str(config)], stdout=log, stderr=log
            )
        endpoint = self.address.removeprefix("tcp://")
        try:
            wait_until(lambda: port_answers(endpoint), timeout=LONG, what="the controller")
        except BaseException:
            self.close()
            raise

    def make_keys(self, name: str) -> Keys:
        return Keys(self._folder, name)

    def allow(self, *clients: Keys) -> None:
        """Replace the list of clients as a whole: `friend` and these."""
        draft = self.allowed.with_suffix(".draft")
        draft.write_text("".join(f"{keys.public} a client\n" for keys in (self.friend, *clients)))
        draft.chmod(0o644)
        draft.replace(self.allowed)

    def config(self, keys: Keys | None, *, controller: str | None = None, address: str | None = None) -> Path:
        """A client's configuration with these keys.

        Args:
            keys: the client's; None: it has none.
            controller: what it takes for the controller's public key. None: the right one.
            address: None: this controller's.
        """
        control: dict[str, Any] = {"address": address or self.address}
        if keys is not None:
            control |= {"controller_key": controller or self.keys.public, "secret_key_file": str(keys.file)}
        content = json.loads(self._serving.config.read_text()) | {"control": control}
        number = len(list(self._folder.glob("client-*.yaml")))
        path = self._folder / f"client-{number}.yaml"
        path.write_text(json.dumps(content))
        return path

    def wait_logged(self, words: str, *, times: int = 1) -> None:
        def logged() -> bool:
            return self.log.read_text().count(words) >= times

        wait_until(logged, timeout=LONG, what=f"{words!r} in the controller's log")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def wait_for(word: str, told: Callable[[], str]) -> str:
    """What is told, once the word is in it."""
    wait_until(lambda: word in told(), timeout=LONG, what=f"{word!r}")
    return told()
