"""The API over HTTP, on a thread of the controller's process."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
import threading
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Final

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from mmcache.config import Settings
from mmcache.controller.admin.app import make_app
from mmcache.controller.admin.desk import Desk
from mmcache.controller.admin.engine_caches import EngineCaches
from mmcache.controller.admin.tokens import VARIABLE, Tokens
from mmcache.controller.mailbox import Mailbox
from mmcache.controller.state.base import StateStore
from mmcache.engines import token_of
from mmcache.errors import ConfigError, LifecycleError

_MOST_CONNECTIONS: Final = 512
_REQUEST_PATIENCE_S: Final = 15
"""How long a connection may be there without a request: each is one of those that may be open at once."""
_START_PATIENCE_S: Final = 20.0
_END_PATIENCE_S: Final = 5.0

_log = logging.getLogger(__name__)


class AdminService:
    """Serves from when it is made until it is closed; a context manager. Only a failure to start raises.

    Args:
        settings: `controller.admin` is set.
        mailbox: of the controller.
        store: its state.
        environ: where tokens may be.

    Raises:
        OSError: the address cannot be bound; `filename` is the setting's value.
        ConfigError: the tokens, or that for engines, are of no use, or there are none where others can reach it.
    """

    def __init__(self, settings: Settings, mailbox: Mailbox, store: StateStore, *, environ: Mapping[str, str]) -> None:
        controller = settings.controller
        if controller.admin is None:
            raise ValueError("controller.admin is not set")
        token_of(settings.engines)  # better found now than when it is needed
        tokens = Tokens(None if controller.admin_tokens is None else Path(controller.admin_tokens), environ)
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(_bound(controller.admin))
            host, port = listener.getsockname()[:2]
            is_open = not tokens.wanted and not controller.admin_open
            if is_open and not ipaddress.ip_address(host.partition("%")[0]).is_loopback:
                raise ConfigError(
                    f"controller.admin is {controller.admin}, which others can reach: give tokens "
                    f"(controller.admin_tokens, {VARIABLE}), or set controller.admin_open to do without"
                )
            stack.pop_all()
        self.address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        """Where it serves."""
        engines = EngineCaches(settings.engines)
        desk = Desk(mailbox, store, tokens, master=settings.store.master, engines=engines, checks_hosts=is_open)
        config = uvicorn.Config(
            make_app(desk, version=version("mmcache")),
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            http=_Impatient,
            loop="asyncio",
            server_header=False,
            proxy_headers=False,
            limit_concurrency=_MOST_CONNECTIONS,
            timeout_keep_alive=_REQUEST_PATIENCE_S,
            timeout_graceful_shutdown=2,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, args=(listener,), name="mmcache-admin", daemon=True)
        self._thread.start()
        until = time.monotonic() + _START_PATIENCE_S
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > until:
                raise LifecycleError("the admin API did not start; the log says why")
            time.sleep(0.005)
        _log.info("admin API at %s%s", self.address, "" if tokens.wanted else ", for anybody without a token")

    def _run(self, listener: socket.socket) -> None:
        try:
            self._server.run(sockets=[listener])
        except Exception:  # noqa: BLE001 (whatever it is, the cache goes on without its API)
            _log.exception("the admin API has ended")
        finally:
            listener.close()

    def close(self) -> None:
        """End it, within seconds. Close the mailbox first: then nobody waits for anything. Idempotent."""
        self._server.should_exit = True
        self._thread.join(_END_PATIENCE_S)
        if self._thread.is_alive():
            _log.warning("the admin API does not end; it goes with the process")

    def __enter__(self) -> AdminService:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Impatient(H11Protocol):
    """One connection. Ends it where no request comes, or none comes whole, which uvicorn would wait for without end."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._patience = self.loop.call_later(_REQUEST_PATIENCE_S, self._give_up, None)

    def on_response_complete(self) -> None:
        answered = self.cycle
        self._patience.cancel()
        self._patience = self.loop.call_later(_REQUEST_PATIENCE_S, self._give_up, answered)
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._patience.cancel()
        super().connection_lost(exc)

    def _give_up(self, answered: object) -> None:
        """No request has begun since that one was answered."""
        if self.cycle is answered:
            self.transport.close()


def _bound(endpoint: str) -> socket.socket:
    """A socket at `host:port` that does not listen yet."""
    host, _, port = endpoint.rpartition(":")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, endpoint) from error
    return listener
