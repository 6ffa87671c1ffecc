"""A schedule: the world that a seed makes, what befalls it, the calm after it, and that all is well then."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Final

from mmcache.client.names import NamedKey
from mmcache.control.messages import ClientMessage, ControllerMessage
from mmcache.controller.state.memory import MemoryStateStore
from mmcache.key import EmbeddingKey
from mmcache.selector import Selector

from . import store_check
from .bounds import CurrentTime, simulated
from .checker import Checker
from .client import Client, Steps
from .clock import Clock, Events, Thread
from .controller import HOLD_MS, Controller
from .disk import Disk
from .network import Network
from .store import Item, Publication, Store
from .weather import CAPACITIES, any_weather
from .work import Work

ACTIVE_S: Final = 12.0
"""How long things go wrong."""
CALM_S: Final = 60.0
"""How long it may take after that until all is well: liveness is no claim about speed."""
LONGEST_PAUSE_S: Final = 6.0
_GONE_BACK: Final = "database goes back"
_LOST: Final = "database is lost"


class World:
    """All that takes part in one schedule."""

    def __init__(self, seed: int, *, verbose: bool = False) -> None:
        self.seed = seed
        self.verbose = verbose
        self.counts: Counter[str] = Counter()
        self.trace: list[str] = []
        self.random = Random(seed)
        self.weather = any_weather(self.random)
        self.events = Events()
        self.time = CurrentTime()
        self.items = {
            EmbeddingKey("m", "1", "a"): Item(64, 1.0),
            EmbeddingKey("m", "1", "b"): Item(100, 20.0),
            EmbeddingKey("m", "1", "a", lora="l"): Item(160, 5.0),
            EmbeddingKey("n", "1", "a"): Item(90, 0.0),
            EmbeddingKey("n", "1", "c"): Item(128, 9.0),
        }
        self.keys = list(self.items)
        self.content = dict.fromkeys(self.keys, 1)
        self.store = Store(
            self.items,
            capacity=self.weather.capacity,
            lease_s=self.weather.lease_ms / 1000,
            on_gone=self.not_computed,
        )
        self.checker = Checker(lambda: self.events.now, self.content, on_complete=self._try_all)
        self.network = Network(self)
        self.work = Work(self)
        self.clients: list[Client] = []
        self._fate = Thread()
        self._active = True
        self._lineages = itertools.count(1)
        self._longest_ttl_ms = self.weather.ttl_ms
        self._disk = Disk(self._new_lineage(), None)
        self._copies: list[MemoryStateStore] = []
        self._went_back = False
        """Whether the database in use went back, found out or not."""
        self._calls_under_way = 0
        """That must succeed in the calm."""
        self._computed: Counter[str] = Counter()

    def run(self) -> None:
        """Play it. Raises Violation."""
        self.say("world", str(self.weather))
        with simulated(self.time, per_push=self.weather.per_push):
            self._start_controller()
            for number in range(self.weather.clients):
                self._start_client(number, 0)
            self._operate()
            if self.weather.pins:
                self._pin()
            if self.weather.faults:
                self.events.after(self.random.random() * 2.0, self._fate, self._strike)
            self.events.run(ACTIVE_S)
            self._become_calm()

    # What everybody uses

    def count(self, what: str) -> None:
        """It happened once more."""
        self.counts[what] += 1

    def say(self, who: str, what: str) -> None:
        """A line of the trace."""
        if self.verbose:
            self.trace.append(f"{self.events.now:9.4f}  {who:<11} {what}")

    def tell(self, message: ClientMessage | ControllerMessage) -> str:
        """A message in short."""
        fields = [
            f"{name}={getattr(message, name)}"
            for name in message.__struct_fields__
            if name not in ("term", "session", "groups", "version", "host", "pid", "awaited", "lease_ms", "hold_ms")
        ]
        return f"{type(message).__name__}({', '.join(fields)})"

    def label(self, key: EmbeddingKey) -> str:
        """A key in short."""
        return f"key {self.keys.index(key)}"

    def chance(self, probability: float) -> bool:
        """Whether it happens this time."""
        return probability > 0.0 and self.random.random() < probability

    def pause(self) -> float:
        """How long a caller does nothing between two steps."""
        weather = self.weather
        if not self.chance(weather.pauses):
            return 0.0
        self.count("pause")
        return min(LONGEST_PAUSE_S, self.random.expovariate(1 / weather.pause_s))

    def computed(self, named: NamedKey) -> None:
        """Somebody has computed it under a claim."""
        self._computed[named.name] += 1
        if self.weather.without_faults and self._active and self._computed[named.name] > 1:
            self.checker.fail(f"S5: {named.name} was computed twice, and nothing went wrong")

    def not_computed(self, name: str) -> None:
        """What was computed under this name is not in the store, or not any more."""
        self._computed[name] = 0

    # The controller

    def end_controller(self) -> None:
        """It is gone; another one starts."""
        self.controller.end()
        self.network.controller_ended()
        self.events.after(self.random.expovariate(1.5), self._fate, self._start_controller)

    def went_back(self) -> None:
        """The controller has found out that its database went back: its operators make a new one."""
        self.count("database found to have gone back")
        self.events.after(self.random.random() * 4.0, self._fate, self._replace_database_that_went_back)

    def _start_controller(self) -> None:
        weather = self.weather
        ttl_ms = weather.ttl_ms
        if _GONE_BACK not in weather.faults and _LOST not in weather.faults and self.chance(0.3):
            ttl_ms = self.random.choice((1_000, 3_000))  # it was configured anew
        clock = Clock(self.random, drifts=weather.drift)
        self.controller = Controller(self, self._disk, clock, ttl_ms=ttl_ms)

    def _replace_database_that_went_back(self) -> None:
        if self._went_back:
            self._replace_database()

    def _replace_database(self) -> None:
        self.say("world", "a new database takes the place of the old one")
        self._copies.clear()
        self._went_back = False
        self._disk = Disk(self._new_lineage(), self.weather.ttl_ms)
        if self.controller.thread.alive:
            self.end_controller()

    def _new_lineage(self) -> str:
        return f"lineage{next(self._lineages)}"

    # Clients, and what they are used for

    def _start_client(self, number: int, start: int) -> None:
        clock = Clock(self.random, drifts=self.weather.drift)
        client = Client(self, f"client {number}.{start}", clock, serves_stale=self.chance(self.weather.stale))
        self.say(client.name, "starts")
        self.clients.append(client)
        if self._active:
            client.begin(self._read(client))
            client.begin(self._publish(client))

    def _read(self, client: Client) -> Steps[None]:
        while self._active:
            yield self.random.expovariate(1.5)
            yield from self.work.get(client, self.random.choice(self.keys))

    def _try_all(self, keys: list[EmbeddingKey]) -> None:
        """An invalidation is complete: whoever may still return what it is for would do so now, or in a moment."""
        if self._active:
            for client in self.clients:
                seconds = self.random.choice((0.0, 0.01, 0.1))
                self.events.after(seconds, client.callers, self._begin_get, client, self.random.choice(keys))

    def _begin_get(self, client: Client, key: EmbeddingKey) -> None:
        client.begin(self.work.get(client, key))

    def _publish(self, client: Client) -> Steps[None]:
        while self._active:
            yield self.random.expovariate(3.0)
            publish = self.work.put if self.random.random() < 0.4 else self.work.get_or_compute
            yield from publish(client, self.random.choice(self.keys))

    def _operate(self) -> None:
        if self._active:
            key = self.random.choice(self.keys)
            selector = self.random.choice(
                (
                    Selector.exactly(key),
                    Selector(mm_hash=key.mm_hash),
                    Selector(model=key.model, mm_hash=key.mm_hash),
                    Selector(model=key.model),
                    Selector(lora=key.lora),
                    Selector(),
                )
            )
            client = self.random.choice(self.clients)
            client.begin(self.work.invalidate(client, selector))
            self.events.after(self.random.expovariate(0.6), self._fate, self._operate)

    def _pin(self) -> None:
        """An operator pins a key, or pins one no more."""
        if self._active:
            key, client = self.random.choice(self.keys), self.random.choice(self.clients)
            selector = Selector.exactly(key) if self.random.random() < 0.8 else Selector(model=key.model)
            client.begin(
                self.work.pin(client, selector) if self.random.random() < 0.7 else self.work.unpin(client, selector)
            )
            self.events.after(self.random.expovariate(1.0), self._fate, self._pin)

    # What goes wrong

    def _strike(self) -> None:
        if not self._active:
            return
        fault = self.random.choice(self.weather.faults)
        self.count(fault)
        self._befall(fault)
        self._copies.append(self._disk.state.copy())
        self.events.after(self.random.expovariate(1 / self.weather.every_s), self._fate, self._strike)

    def _befall(self, fault: str) -> None:
        random, now, ttl_s = self.random, self.events.now, self.weather.ttl_ms / 1000
        seconds = min(LONGEST_PAUSE_S, random.expovariate(1 / random.choice((0.3, ttl_s / 2, ttl_s * 1.5))))
        client = random.choice(self.clients)
        match fault:
            case "client is stopped":
                threads = random.choice(((client.channel, client.callers), (client.channel,), (client.callers,)))
                for thread in threads:
                    thread.stopped_until = max(thread.stopped_until, now + seconds)
                self.say(client.name, f"is stopped for {seconds:.3f} s" + " in part" * (len(threads) == 1))
            case "client dies" | "client leaves":
                if fault == "client leaves":
                    client.leave()
                else:
                    client.die()
                    if random.random() < 0.5:  # in the middle of a put
                        key, lineage = random.choice(self.keys), self._disk.lineage
                        named = NamedKey.of(key, lineage, self.checker.generation(lineage, key))
                        self.store.hold(named.name, now + HOLD_MS / 1000)
                self.say(client.name, fault.removeprefix("client "))
                self._replace_client(client)
            case "connection breaks":
                if client.connection is not None:
                    self.say(client.name, "loses its connection")
                    self.network.break_off(client.connection)
            case "connection stalls":
                if client.connection is not None:
                    self.say(client.name, f"has a connection that stalls for {seconds:.3f} s")
                    self.network.stall(client.connection, seconds)
            case "entries are evicted":
                self.store.evict([name for name in self.store.objects if random.random() < 0.4])
            case "controller is stopped":
                thread = self.controller.thread
                thread.stopped_until = max(thread.stopped_until, now + seconds)
                self.say("controller", f"is stopped for {seconds:.3f} s")
            case "controller dies" if self.controller.thread.alive:
                self.say("controller", "is killed")
                self.end_controller()
            case "database is lost" if self.controller.thread.alive:
                self._replace_database()
            case "database goes back" if self.controller.thread.alive and self._copies:
                copy = random.choice(self._copies)
                self.say("world", f"the database goes back to head {copy.head}")
                self.end_controller()
                self._disk.restore(copy)
                self._copies.clear()
                self.checker.went_back(self._disk.lineage, copy.head)
                self._went_back = True

    def _replace_client(self, client: Client) -> None:
        """Another one comes in its place."""
        self.clients.remove(client)
        number, start = client.name.removeprefix("client ").split(".")
        if self.clients:
            after = self.random.expovariate(1.0)
            self.events.after(after, self._fate, self._start_client, int(number), int(start) + 1)
        else:
            self._start_client(int(number), int(start) + 1)

    # The calm after it

    def _become_calm(self) -> None:
        """Nothing goes wrong any more: everything under way ends, and then everything works."""
        self._active = False
        self.weather = self.weather.calm()
        self.say("world", "becomes calm")
        self._replace_database_that_went_back()
        self._until_calm("after the faults")
        self.clients[0].begin(self.work.invalidate(self.clients[0], Selector()))
        self._until_calm("after an invalidation of everything")
        self._call_all(self.work.get_or_compute, self.clients[:1], "after publications")
        self.store.capacity = CAPACITIES[-1]  # so that all of it stays
        self._until_calm("after the store has grown")
        self._call_all(self.work.get_or_compute, self.clients, "after more publications")
        if not self.weather.rules.ages:
            self._call_all(self.work.get, self.clients, "after reads")

    def _call_all(
        self, call: Callable[..., Steps[bool | Publication | None]], clients: list[Client], when: str
    ) -> None:
        """Each of these clients makes it for each key."""
        self._calls_under_way = len(clients) * len(self.keys)
        for client, key in itertools.product(clients, self.keys):
            client.begin(self._succeed(client, key, call))
        self._until_calm(when)

    def _succeed(
        self, client: Client, key: EmbeddingKey, call: Callable[..., Steps[bool | Publication | None]]
    ) -> Steps[None]:
        """Call until it succeeds: what is still on the way may be late."""
        while not (outcome := (yield from call(client, key))):
            yield 0.3
        if isinstance(outcome, Publication) and outcome.content != self.content[key]:
            self.checker.fail(
                f"{client.name} reads content {outcome.content} of {self.label(key)}: {self.content[key]} is now"
            )
        self._calls_under_way -= 1

    def _until_calm(self, when: str) -> None:
        until = self.events.now + CALM_S
        step = 0.5
        while True:
            self.events.run(self.events.now + step)
            unrest = self._unrest()
            if not unrest:
                return
            if self.events.now >= until:
                self.checker.fail(f"L: {CALM_S:.0f} s {when}: {unrest}")
            step = 1.0

    def _unrest(self) -> str:
        """What is not well yet; in a word where all is calm, that too is checked which must hold then."""
        controller, work = self.controller, self.work
        if not controller.thread.alive:
            return "there is no controller"
        if len(self.clients) < self.weather.clients:
            return "a client has not started yet"
        core, lineage = controller.core, controller.core.lineage
        if core.went_back:
            return "the controller refuses to serve"
        stats = core.stats()
        for what in ("claims", "waiters", "invalidations_pending"):
            if stats[what]:
                return f"L1, L2: the controller has {stats[what]} {what}"
        if any(client.callers.alive for client in work.operators.values()):
            return "an operator has not heard that an invalidation is complete"
        if self._calls_under_way:
            return f"L2: {self._calls_under_way} calls have not ended"
        if trouble := store_check.trouble(core, self.store, self.checker):
            return trouble
        for client in self.clients:
            view, exchange = client.fresh(), client.exchange
            if view is None or not client.connected_now:
                return f"{client.name} is not fresh"
            if (view.lineage, view.replica.head) != (lineage, stats["head"]):
                return f"{client.name} is behind"
            asked = any(request.call is not None for request in exchange._requests.values())  # renewals have none
            if asked or exchange._waits or len(exchange._claims):
                return f"{client.name} has requests, waits or claims"
        for key in self.keys:
            generation = self.checker.generation(lineage, key)
            for client in self.clients:
                theirs = client.generation(key)
                if theirs != generation:
                    self.checker.fail(
                        f"{client.name} takes {self.label(key)}, of generation {generation}, for {theirs}"
                    )
        return ""
