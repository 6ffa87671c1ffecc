"""Clients of a controller for `benchmarks.control`: every frame is encoded before the clock starts.

They speak the protocol and nothing else: what a client of mmcache adds is measured elsewhere. Commits carry no tokens,
which are not known beforehand; the controller takes a commit of the current generation whatever its token.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import zmq

from mmcache.control.messages import (
    PROTOCOL_VERSION,
    Acquire,
    Acquired,
    ClientMessage,
    Commit,
    CommitGroup,
    Commitment,
    Committed,
    Found,
    Hello,
    KeyGroup,
    Lookup,
    Resolved,
    Welcome,
    decode_from_controller,
    encode,
)
from mmcache.entry import EntryHeader, encode_info, lay_out
from mmcache.key import EmbeddingKey, EncoderFingerprint, mm_digest

BATCH: Final = 16
HOT: Final = 1000
"""How many entries the hits are spread over."""
COMMITS: Final = 128
"""Entries a commit while the directory is filled."""
PATIENCE_MS: Final = 20_000
WAIT_MS: Final = 30_000

KEY: Final = EmbeddingKey("Qwen/Qwen3-VL-8B", EncoderFingerprint(weights="sha256:4f5c", dtype="bfloat16").version, "0")
_TENSORS, NBYTES = lay_out([(name, "bfloat16", (576, 4096)) for name in ("embedding", "deepstack_0", "deepstack_1")])
INFO: Final = encode_info(EntryHeader(KEY, 0, _TENSORS, {"grid_thw": [1, 48, 48], "num_tokens": 576}, 1.0, "", 0))
"""What the directory keeps of each entry: about 130 bytes, as of a vision encoder with several outputs."""

_ACQUIRED, _FOUND, _COMMITTED, _RESOLVED = (
    message.__struct_config__.tag for message in (Acquired, Found, Committed, Resolved)
)
_Socket = zmq.Socket[bytes]


class Mix(NamedTuple):
    """What one request asks for: entries that are there, and ones that are not, which are committed when granted."""

    hits: int
    grants: int
    lookup: bool = False


MIXES: Final = {
    "hits": Mix(BATCH, 0),
    "grants": Mix(0, BATCH),
    "mixed": Mix(BATCH // 2, BATCH // 2),
    "lookup": Mix(BATCH, 0, lookup=True),
}


class Keys:
    """The mm_hashes of a run: some that are published first, and an endless supply of new ones."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self.hot = self.new(HOT)
        self._digests = itertools.cycle([mm_digest(mm_hash) for mm_hash in self.hot])

    def new(self, count: int) -> list[str]:
        """Such as a SHA-256 in hex, and never the same twice."""
        return [f"{number:064x}" for number in itertools.islice(self._numbers, count)]

    def hot_digests(self, count: int) -> list[bytes]:
        return list(itertools.islice(self._digests, count))


class Client:
    """One connection with a session, and the requests that it is to send."""

    def __init__(self, context: zmq.Context[_Socket], address: str) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.connect(address)
        self.outstanding = 0
        self._requests = itertools.count(1)
        self._questions: deque[bytes] = deque()
        self._commits: deque[bytes] = deque()
        self.socket.send(encode(Hello(PROTOCOL_VERSION, "benchmark", "localhost", 1)))
        welcome = decode_from_controller(self.receive())
        if not isinstance(welcome, Welcome):
            raise SystemExit(f"the server answered a hello with {welcome}")
        self._term, self._session = welcome.term, welcome.session

    @property
    def left(self) -> int:
        """How many requests are prepared and not sent."""
        return len(self._questions)

    def prepare(self, mix: Mix, keys: Keys, count: int) -> None:
        """Encode requests of a mix, with the commits that will follow them."""
        for _ in range(count):
            new = keys.new(mix.grants)
            digests = keys.hot_digests(mix.hits) + [mm_digest(mm_hash) for mm_hash in new]
            self._questions.append(encode(self._question(digests, lookup=mix.lookup)))
            if new:
                self._commits.append(self.commit(new))

    def _question(self, digests: list[bytes], *, lookup: bool = False) -> ClientMessage:
        groups, request = [KeyGroup(KEY.scope, digests)], next(self._requests)
        if lookup:
            return Lookup(self._term, self._session, request, groups)
        return Acquire(self._term, self._session, request, WAIT_MS, groups)

    def acquire(self, mm_hash: str) -> bytes:
        """The frame that acquires one key."""
        return encode(self._question([mm_digest(mm_hash)]))

    def commit(self, mm_hashes: Sequence[str]) -> bytes:
        """The frame that commits entries."""
        entries = [Commitment(mm_hash, 0, 0, NBYTES, 12.5, INFO) for mm_hash in mm_hashes]
        return encode(Commit(self._term, self._session, next(self._requests), [CommitGroup(KEY.scope, entries)]))

    def ask(self, count: int) -> None:
        """Send the next requests, as many as there are."""
        for _ in range(min(count, len(self._questions))):
            self.socket.send(self._questions.popleft())
            self.outstanding += 1

    def finished(self) -> int:
        """Take what has come, and commit what was granted; returns how many requests are done with that."""
        done = 0
        try:
            while True:
                tag = self.socket.recv(zmq.DONTWAIT)[1]
                if tag == _ACQUIRED and self._commits:
                    self.socket.send(self._commits.popleft())
                elif tag in (_ACQUIRED, _FOUND, _COMMITTED):
                    done += 1
                else:
                    raise SystemExit(f"the server sent a message of kind {tag}")
        except zmq.Again:
            self.outstanding -= done
            return done

    def receive(self) -> bytes:
        """The next frame."""
        if not self.socket.poll(PATIENCE_MS):
            raise SystemExit("the server does not answer")
        return self.socket.recv()


def fill(client: Client, mm_hashes: Iterator[list[str]], *, window: int = 8) -> None:
    """Enter entries in the directory, each list with one commit."""
    outstanding = 0
    for batch in mm_hashes:
        client.socket.send(client.commit(batch))
        outstanding += 1
        if outstanding == window:
            client.receive()
            outstanding -= 1
    for _ in range(outstanding):
        client.receive()


class Clients:
    """Clients that are waited for together."""

    def __init__(self, clients: Sequence[Client]) -> None:
        self._by_socket = {client.socket: client for client in clients}
        self._poller = zmq.Poller()
        for client in clients:
            self._poller.register(client.socket, zmq.POLLIN)

    def ready(self, timeout_ms: int) -> list[Client]:
        """Those that something has come for."""
        return [self._by_socket[socket] for socket, _ in self._poller.poll(timeout_ms)]

    def settle(self, window: int = 0) -> None:
        """Have each send what it has prepared, `window` requests at a time, until all that was asked is answered."""
        for client in self._by_socket.values():
            client.ask(window)
        while any(client.outstanding for client in self._by_socket.values()):
            ready = self.ready(PATIENCE_MS)
            if not ready:
                raise SystemExit("the server does not answer")
            for client in ready:
                done = client.finished()
                if window:
                    client.ask(done)


def saturate(clients: Sequence[Client], window: int) -> float:
    """Seconds until all that the clients have prepared is answered, with `window` requests of each under way."""
    together = Clients(clients)
    started = time.perf_counter()
    together.settle(window)
    return time.perf_counter() - started


def beside(probe: Client, clients: Sequence[Client], rate: float) -> list[float]:
    """Seconds that each of the probe's acquires took, one after another, while the clients send `rate` a second.

    From before it is sent until its answer is here; its commit, which comes before the next one, is not in it.
    """
    together = Clients([probe, *clients])
    turns = itertools.cycle(clients)
    seconds: list[float] = []
    due = time.perf_counter()
    sent = 0.0  # when the acquire under way was; 0: it is answered and its commit is not
    while probe.left and any(client.left for client in clients):
        if not probe.outstanding:
            sent = time.perf_counter()
            probe.ask(1)
        while due <= time.perf_counter():
            next(turns).ask(1)
            due += 1 / rate
        ready = together.ready(1)
        if probe in ready and sent:
            seconds.append(time.perf_counter() - sent)
            sent = 0.0
        for client in ready:
            client.finished()
    together.settle()
    return seconds


def resolutions(computes: Client, waits: Client, keys: Keys, count: int) -> list[float]:
    """Seconds from before a commit is sent until who waits for that key has its entry, for one key after another."""
    frames = [(computes.acquire(key), waits.acquire(key), computes.commit([key])) for key in keys.new(count)]
    seconds = []
    for claim, wait, commit in frames:
        computes.socket.send(claim)
        computes.receive()
        waits.socket.send(wait)
        waits.receive()
        started = time.perf_counter()
        computes.socket.send(commit)
        resolved = waits.receive()
        seconds.append(time.perf_counter() - started)
        if resolved[1] != _RESOLVED:
            raise SystemExit("a wait did not end with the commit")
        computes.receive()
    return seconds
