"""A controller with its admin API in this process, on real sockets, and clients of both."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from mmcache.config import ControllerSettings, EnginesSettings, Settings, StoreSettings
from mmcache.controller.admin.service import AdminService
from mmcache.controller.limits import ControllerLimits
from mmcache.controller.mailbox import Mailbox
from mmcache.controller.server import begin_term, serve, volatile_store
from mmcache.controller.state.base import StateStore

PATIENCE_S = 20.0
TTL_MS = 400
VIEWER = "viewer-" + "v" * 20
OPERATOR = "operator-" + "o" * 20
EXPIRED = "expired-" + "e" * 20
TOKENS = f"""
- {{name: grafana, role: viewer, token: {VIEWER}}}
- {{name: alice, role: operator, token: {OPERATOR}}}
- {{name: bob, role: operator, token: {EXPIRED}, expires: 2020-01-01T00:00:00Z}}
"""
NO_VARIABLES: Mapping[str, str] = {}


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


class AdminApi:
    """A server on one thread, its API on another. `client` is an operator's where there are tokens.

    Args:
        tokens: the file's text; None: no tokens are wanted.
    """

    def __init__(
        self,
        folder: Path,
        *,
        tokens: str | None = TOKENS,
        store: StateStore | None = None,
        limits: ControllerLimits | None = None,
        environ: Mapping[str, str] = NO_VARIABLES,
        engines: EnginesSettings | None = None,
        **controller: Any,
    ) -> None:
        self.tokens = folder / "tokens.yaml"
        if tokens is not None:
            self.write_tokens(tokens)
            controller["admin_tokens"] = str(self.tokens)
        self.store = volatile_store() if store is None else store
        self.mailbox = Mailbox()
        settings = Settings(
            controller=ControllerSettings(admin="127.0.0.1:0", **controller),
            store=StoreSettings(master="127.0.0.1:1"),
            engines=engines or EnginesSettings(),
        )
        self._stopped, self._stop = os.pipe()
        self.core, recorder = begin_term(self.store, limits or ControllerLimits(ttl_ms=TTL_MS))
        self.service = AdminService(settings, self.mailbox, self.store, environ=environ)
        bound = threading.Event()
        addresses: list[str] = []

        def tell(address: str) -> None:
            addresses.append(address)
            bound.set()

        self._thread = threading.Thread(
            target=serve,
            args=("tcp://127.0.0.1:0", self.core, recorder),
            kwargs={"mailbox": self.mailbox, "ready": tell, "stop": self._stopped},
        )
        self._thread.start()
        assert bound.wait(PATIENCE_S)
        self.control = addresses[0]
        self.client = self.connect(OPERATOR if tokens is not None else None)

    def write_tokens(self, text: str) -> None:
        self.tokens.touch(mode=0o600)
        self.tokens.write_text(text)

    def connect(self, token: str | None) -> httpx.Client:
        headers = {} if token is None else bearer(token)
        return httpx.Client(base_url=self.service.address, headers=headers, timeout=PATIENCE_S, trust_env=False)

    def invalidate(self, selector: Mapping[str, str | None], **fields: Any) -> httpx.Response:
        headers = fields.pop("headers", None)
        return self.client.post("/v1/invalidations", json={"selector": selector, **fields}, headers=headers)

    def stop_server(self) -> None:
        """The controller ends, as it does by itself; its API is there still."""
        if self._thread.is_alive():
            os.write(self._stop, b"x")
            self._thread.join(PATIENCE_S)

    def __enter__(self) -> AdminApi:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.stop_server()
        self.service.close()
        os.close(self._stop)
        os.close(self._stopped)
        self.store.close()


def assert_problem(response: httpx.Response, status: int, word: str) -> str:
    """That it is a problem document; returns what it says."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    problem = response.json()
    assert problem["type"] == f"urn:mmcache:problem:{word}"
    assert problem["status"] == status
    assert problem["title"]
    return problem["detail"]
