"""Connections between clients and the controller. Within one, messages stay in order; single ones may be lost.

A connection that breaks loses all that is in flight, or what was sent last of it, and is made anew by itself: for the
controller that is another peer. Each side learns of the end late, or never.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

from mmcache.control.messages import (
    ClientMessage,
    ControllerMessage,
    decode_from_client,
    decode_from_controller,
    encode,
)

if TYPE_CHECKING:
    from .client import Client
    from .world import World

_QUICK_S = 0.002


class Pipe:
    """A connection while it does not break. `peer` is the controller's name for it."""

    __slots__ = ("connection", "down_at", "down_until", "ends_at", "peer", "up_at", "up_until")

    def __init__(self, peer: bytes, connection: Connection) -> None:
        self.peer = peer
        self.connection = connection
        self.up_at = self.down_at = 0.0
        """When the last message arrives that is on the way."""
        self.up_until = self.down_until = math.inf
        """What arrives later is lost."""
        self.ends_at = math.inf
        """From when on the controller cannot send over it."""


class Connection:
    """A client's socket."""

    __slots__ = ("client", "open", "pipe", "was_up")

    def __init__(self, client: Client) -> None:
        self.client = client
        self.open = True
        self.was_up = False
        self.pipe: Pipe | None = None


class Network:
    """All connections."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._events = world.events
        self._random = world.random
        self._peers = itertools.count(1)
        self._pipes: dict[bytes, Pipe] = {}
        self.framed = world.seed % 8 == 0
        """Whether messages are encoded and decoded on the way, which takes as long as all the rest."""

    def connect(self, client: Client) -> Connection:
        """A client opens a socket, which connects when it can."""
        connection = Connection(client)
        self._events.after(self._soon(), client.channel, self._establish, connection)
        return connection

    def close(self, connection: Connection) -> None:
        """A client closes it, or has died. What is on the way to the controller may arrive or not."""
        connection.open = False
        if (pipe := connection.pipe) is not None:
            connection.pipe = None
            self._end(pipe, loses_answers=False)

    def break_off(self, connection: Connection) -> None:
        """It breaks, and is made anew."""
        if connection.open and (pipe := connection.pipe) is not None:
            connection.pipe = None
            self._end(pipe, loses_answers=True)
            self._events.after(0.05 + self._random.random(), connection.client.channel, self._establish, connection)

    def stall(self, connection: Connection, seconds: float) -> None:
        """Nothing gets through for a while, one way or both ways."""
        if (pipe := connection.pipe) is not None:
            until = self._events.now + seconds
            if (ways := self._random.randrange(3)) != 1:
                pipe.up_at = max(pipe.up_at, until)
            if ways != 2:
                pipe.down_at = max(pipe.down_at, until)

    def controller_ended(self) -> None:
        """All connections break, and are made anew once there is a controller."""
        for pipe in list(self._pipes.values()):
            if pipe.connection.pipe is pipe:
                self.break_off(pipe.connection)
        self._pipes.clear()

    def send_up(self, connection: Connection, message: ClientMessage) -> bool:
        """A client sends; False if its socket is not connected."""
        pipe = connection.pipe
        if pipe is None:
            return False
        if self.framed:
            message = decode_from_client(encode(message))
        thread = self._world.controller.thread
        for delay in self._delays(message):
            pipe.up_at = max(pipe.up_at, self._events.now + delay)
            self._events.after(pipe.up_at - self._events.now, thread, self._deliver_up, pipe, message)
        return True

    def send_down(self, peer: bytes, message: ControllerMessage) -> bool:
        """The controller sends; False if it cannot, and knows it."""
        pipe = self._pipes.get(peer)
        if pipe is None or pipe.ends_at <= self._events.now or self._chance(self._world.weather.unsendable):
            return False
        if self.framed:
            message = decode_from_controller(encode(message))
        for delay in self._delays(message):
            pipe.down_at = max(pipe.down_at, self._events.now + delay)
            seconds = pipe.down_at - self._events.now
            self._events.after(seconds, pipe.connection.client.channel, self._deliver_down, pipe, message)
        return True

    def _deliver_up(self, pipe: Pipe, message: ClientMessage) -> None:
        if self._events.now <= pipe.up_until and self._pipes.get(pipe.peer) is pipe:
            self._world.controller.receive(pipe.peer, message)

    def _deliver_down(self, pipe: Pipe, message: ControllerMessage) -> None:
        connection = pipe.connection
        if self._events.now <= pipe.down_until and connection.open:
            connection.client.receive(connection, message)

    def _establish(self, connection: Connection) -> None:
        if not connection.open or connection.pipe is not None:
            return
        if not self._world.controller.thread.alive:
            self._events.after(0.05 + self._random.random(), connection.client.channel, self._establish, connection)
            return
        connection.pipe = pipe = Pipe(b"%d" % next(self._peers), connection)
        self._pipes[pipe.peer] = pipe
        if not connection.was_up:
            connection.was_up = True
            connection.client.connected(connection)

    def _end(self, pipe: Pipe, *, loses_answers: bool) -> None:
        now, random = self._events.now, self._random
        if random.random() < 0.5:
            pipe.up_until = now + random.random() * 0.1
        if loses_answers and random.random() < 0.5:
            pipe.down_until = now + random.random() * 0.1
        pipe.ends_at = now + random.choice((0.0, self._soon(), 10.0))

    def _delays(self, message: object) -> list[float]:
        """When it arrives: usually once."""
        weather, count = self._world.weather, self._world.count
        if self._chance(weather.lost):
            count("message lost")
            if self._world.verbose:
                self._world.say("network", f"loses {message}")
            return []
        delays = [self._soon()]
        if self._chance(weather.slow):
            count("message slow")
            delays[0] += self._random.expovariate(1 / weather.slow_s)
        if self._chance(weather.repeated):
            count("message repeated")
            delays.append(self._soon() + self._random.expovariate(1 / weather.slow_s))
        return delays

    def _chance(self, probability: float) -> bool:
        return probability > 0.0 and self._random.random() < probability

    def _soon(self) -> float:
        return _QUICK_S * (0.1 + self._random.random())
