"""One start of a controller: the loop around the real core, as its server runs it, and what may befall it there."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mmcache.control.messages import Applied, ClientMessage, Heartbeat, Hello
from mmcache.controller.core import ControllerCore, Effects
from mmcache.controller.limits import ControllerLimits
from mmcache.controller.state.base import StateFull, StateLost
from mmcache.controller.state.memory import Fault

from .claims_watch import ClaimsWatch
from .clock import Clock, Thread
from .reaper import Reaper
from .removals_watch import RemovalsWatch

if TYPE_CHECKING:
    from .disk import Disk
    from .world import World

CLAIM_MS, HOLD_MS = 3_000, 4_000


class Controller:
    """A process that serves until it is killed, or a write fails whose outcome is unknown."""

    def __init__(self, world: World, disk: Disk, clock: Clock, *, ttl_ms: int) -> None:
        self.thread = Thread()
        self.disk = disk
        self.ttl_ms = ttl_ms
        self._world = world
        self._clock = clock
        self._inbox: list[tuple[bytes, ClientMessage]] = []
        self._calls: list[Callable[[ControllerCore, float], object]] = []
        self._busy = False
        self._refuses = False
        """Whether the database was known to have gone back before the messages at hand came."""
        self._wakes_at = 0.0
        random = world.random
        term = random.getrandbits(62) + 1
        past = disk.open(term=term, ttl_ms=ttl_ms, now=self.now(), at=world.events.now)
        self._strangers_until = past.strangers_until
        limits = ControllerLimits(
            ttl_ms=ttl_ms,
            claim_ms=CLAIM_MS,
            hold_ms=HOLD_MS,
            lease_ms=world.weather.lease_ms,
            capacity=world.weather.rules,
            pinned_share=0.6,
            max_invalidations=world.weather.budget,
            max_abandonments=2,
            abandonment_ms=1_000,
        )
        self.core = ControllerCore(limits, term=term, past=past, random_session=lambda: random.getrandbits(62) + 1)
        self._claims = ClaimsWatch(self.core)
        self.removals = RemovalsWatch(self.core, world.store, world.checker)
        world.say(
            "controller", f"starts: lineage {disk.lineage}, term {term % 1000}, head {past.head}, TTL {ttl_ms} ms"
        )
        world.checker.began(disk.lineage, term)
        self._reaper = Reaper(world, self)
        self._rest()

    def receive(self, peer: bytes, message: ClientMessage) -> None:
        """A message has come."""
        self._inbox.append((peer, message))
        if self._busy:
            return
        if self._world.chance(self._world.weather.gathered):
            self._later(0.01, self._serve)
        else:
            self._serve()

    def call(self, act: Callable[[ControllerCore, float], object]) -> None:
        """Have the loop do this with the core, as soon as it is between two bursts."""
        self._calls.append(act)
        if not self._busy:
            self._serve()

    def end(self) -> None:
        """It is gone, and its reaper's child with it."""
        self.thread.alive = False
        self._reaper.end()

    def _serve(self) -> None:
        """Read what is there and act on it at one time, which is after all of it was sent."""
        now = self.now()
        core, world = self.core, self._world
        self._refuses = bool(core.went_back)
        effects = core.tick(now)
        calls, self._calls = self._calls, []
        for call in calls:
            call(core, now)
        self.removals.ticked(now)
        received, self._inbox = self._inbox, []
        for peer, message in received:
            if world.verbose and not isinstance(message, Heartbeat):
                world.say("controller", f"← {peer.decode()}: {world.tell(message)}")
            ahead = self._is_ahead(message)
            self._claims.received(peer, message)
            made = core.handle(peer, message, now)
            self.removals.handled(message, made, now)
            effects += made
            if ahead and not core.went_back and self._is_heard(peer, message):
                world.checker.fail(
                    f"a client is ahead of the head {core.stats()['head']}, and the controller serves on"
                )
        if core.went_back and not self._refuses:
            world.say("controller", core.went_back)
            world.went_back()
        self._go_on(self._write_and_send, effects, now)

    def _write_and_send(self, effects: Effects, now: float) -> None:
        if self._strangers_until is not None and now >= self._strangers_until:
            self._strangers_until = None
            self.disk.state.settle_terms()
        try:
            effects += self._write(now)
        except StateLost:
            self._world.say("controller", "a write failed, and its outcome is unknown: it stops")
            self._world.count("write failed")
            self._world.end_controller()
            return
        self._go_on(self._send, effects, now)

    def _write(self, now: float) -> Effects:
        """Make durable what must be before anyone hears of it."""
        world, state = self._world, self.disk.state
        effects: Effects = []
        while (todo := self.core.take_writes()) is not None:
            state.fault = self._fault() if todo.asked or todo.scopes or todo.pins else None
            head = state.head
            try:
                numbered = self.disk.write(todo, world.events.now)
            except StateFull as error:
                world.say("controller", f"no room to write {len(todo.asked)} invalidations")
                world.count("write without room")
                return effects + self.core.not_written(str(error))
            except StateLost:
                if state.head > head:  # nobody will be told, and yet it is so
                    made = [(number, one.selector) for number, one in enumerate(todo.asked, todo.first)]
                    world.checker.durable(self.disk.lineage, made)
                raise
            finally:
                state.fault = None
            world.checker.durable(self.disk.lineage, numbered)
            world.checker.completed(self.disk.lineage, todo.completed)
            effects += self.core.written(now)
        return effects

    def _send(self, effects: Effects, now: float) -> None:
        """Send in order. Who loses a message gets none of the rest, since its session is over."""
        world, lost = self._world, set[bytes]()
        for peer, message in effects:
            world.checker.told(self.disk.lineage, message, went_back=self._refuses)
            self._claims.sent(message, now, world.checker)
            if peer in lost:
                continue
            if not world.network.send_down(peer, message):
                lost.add(peer)
                world.count("unreachable")
                world.say("controller", f"cannot reach {peer.decode()}")
                effects += self.core.unreachable(peer, now)  # and on with these
        self._busy = False
        if self._inbox or self._calls:
            self._later(0.0, self._serve)
        else:
            self._rest()

    def _go_on(self, step: Callable[[Effects, float], None], effects: Effects, now: float) -> None:
        """The next step of the loop: at once, after a while, or never."""
        world = self._world
        if not world.chance(world.weather.hesitates):
            step(effects, now)
            return
        self._busy = True
        world.count("controller hesitates")
        if "controller dies" in world.weather.faults and world.chance(0.2):
            world.say("controller", "is killed in the middle of its loop")
            world.end_controller()
        else:
            world.events.after(world.random.expovariate(2.0), self.thread, step, effects, now)

    def _later(self, seconds: float, act: Callable[[], None]) -> None:
        self._busy = True
        self._world.events.after(seconds, self.thread, act)

    def _rest(self) -> None:
        """Sleep until there is something to do."""
        due = self.core.next_deadline()
        if due is None:
            return
        events = self._world.events
        wakes_at = max(events.now, self._clock.when(due))
        if not events.now < self._wakes_at <= wakes_at:
            self._wakes_at = events.after(wakes_at - events.now, self.thread, self._wake)

    def _wake(self) -> None:
        if not self._busy:
            self._serve()

    def _fault(self) -> Fault | None:
        weather, chance = self._world.weather, self._world.chance
        if chance(weather.full):
            return Fault.FULL
        if chance(weather.before):
            return Fault.BEFORE
        return Fault.AFTER if chance(weather.after) else None

    def _is_ahead(self, message: ClientMessage) -> bool:
        head = self.core._invalidations.head
        match message:
            case Hello():
                return message.lineage == self.core.lineage and message.applied > min(
                    head, self._world.checker.lasts(message.lineage, message.term)
                )
            case Heartbeat() | Applied():
                return message.term == self.core.term and message.applied > head
        return False

    def _is_heard(self, peer: bytes, message: ClientMessage) -> bool:
        session = self.core._sessions.at(peer)
        return isinstance(message, Hello) or (session is not None and session.number == message.session)  # type: ignore[union-attr]

    def now(self) -> float:
        """What its clock says."""
        return self._clock.at(self._world.events.now)
