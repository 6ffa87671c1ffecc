"""The table of items, against an agent, workers and requests that do whatever they may in any order."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from mmcache.agent.messages import Ask, Drop, Encoded, Granted, Item, Missing, Published, Ready, Waiting
from mmcache.integrations.vllm.item import Copy, Resident, Wanted
from mmcache.integrations.vllm.items import GRACE_S, GRANT_PATIENCE_S, ItemTable
from mmcache.key import EmbeddingKey

FETCH_S, WAIT_S = 2.0, 10.0
STAGING = 64 * 4096


def wanted(number: int = 0, *, rows: int = 16, encodable: bool = True, shared: bool = True) -> Wanted:
    key = EmbeddingKey("model", "1", f"item-{number}") if shared else None
    return Wanted(f"id-{number}", key, rows, (64, 128), "bfloat16", 2, 100 * (number + 1), encodable)


class World:
    """A table, and what was said to its agent."""

    def __init__(self, *, loads: bool = True, saves: bool = True, staging: int = STAGING) -> None:
        self.epoch = 1
        self.now = 100.0
        self.table = ItemTable(
            staging,
            is_fresh=lambda epoch: epoch == self.epoch,
            loads=loads,
            saves=saves,
            fetch_s=FETCH_S,
            wait_s=WAIT_S,
        )

    def sent(self) -> list[object]:
        sent, self.table.outbox[:] = list(self.table.outbox), []
        return sent

    def asked(self) -> list[Item]:
        return [item for message in self.sent() if isinstance(message, Ask) for item in message.items]

    def want(self, request: str, *items: Wanted, reachable: bool = True) -> tuple[bool, bool]:
        return self.table.want(request, items, self.now, reachable=reachable)

    def hear(self, message: object) -> None:
        self.table.heard(message, self.now)  # type: ignore[arg-type]

    def step(
        self, resident: Mapping[str, Resident] | None = None, *, reaches_workers: bool = True
    ) -> tuple[int, list[Copy], list[Copy]]:
        return self.table.build_step(resident or {}, self.now, reaches_workers=reaches_workers)

    def ready(self, item: Item, *, width: int = 64, epoch: int | None = None) -> Ready:
        shape = [item.rows, width]
        epoch = self.epoch if epoch is None else epoch
        return Ready(item.number, epoch, shape, item.rows * width * 2, "store")

    def all_free(self) -> bool:
        return self.table.free_bytes == STAGING


def test_bytes_that_another_engine_made_are_loaded_and_their_block_is_kept_until_all_workers_have_them() -> None:
    world = World()
    assert world.want("r", wanted()) == (True, False)
    [item] = world.asked()
    assert item.claim
    assert world.want("r", wanted()) == (True, False)
    assert world.asked() == []  # once
    world.hear(world.ready(item))
    assert world.want("r", wanted()) == (False, False)
    assert world.table.has(wanted())
    world.table.allocated(wanted())
    number, [load], saves = world.step()
    assert (load.identifier, load.offset, load.nbytes, load.rows, load.width) == ("id-0", item.offset, 2048, 16, 64)
    assert saves == []
    world.table.request_ended("r")
    assert not world.all_free()
    world.table.step_returned(number, {})
    assert world.all_free()


@pytest.mark.parametrize("granted", [False, True])
def test_copies_are_for_the_identifier_that_the_engine_allocates_of_those_with_one_key(granted: bool) -> None:
    """Of two adapters with the same weights, say: vLLM has their names in identifiers."""
    world = World()
    one, other = wanted()._replace(identifier="one:id-0"), wanted()._replace(identifier="other:id-0")
    world.want("r", one)
    [item] = world.asked()
    assert world.want("s", other) == (True, False)
    world.hear(Granted(item.number) if granted else world.ready(item))
    assert world.table.has(other) is not granted
    world.table.allocated(other)
    _, loads, saves = world.step()
    assert [copy.identifier for copy in loads + saves] == ["other:id-0"]


def test_what_was_allocated_in_a_step_that_runs_nothing_is_loaded_in_the_next() -> None:
    """Its request was preempted in the same pass, for one with a higher priority that found no room either."""
    world = World()
    world.want("r", wanted())
    [item] = world.asked()
    world.hear(world.ready(item))
    world.table.allocated(wanted())
    assert world.step(reaches_workers=False)[1:] == ([], [])
    assert not world.all_free()
    number, [load], _ = world.step()
    assert load.identifier == "id-0"
    world.table.step_returned(number, {})
    assert world.all_free()


def test_what_is_granted_is_encoded_saved_and_published() -> None:
    world = World()
    world.want("r", wanted())
    [item] = world.asked()
    world.hear(Granted(item.number))
    assert world.want("r", wanted()) == (False, False)
    assert not world.table.has(wanted())
    world.table.allocated(wanted())
    number, loads, [save] = world.step()
    assert loads == []
    assert (save.offset, save.nbytes, save.rows, save.width) == (item.offset, 16 * 128 * 2, 16, 0)
    world.table.request_ended("r")
    assert world.sent() == []  # the result is wanted by others
    world.table.step_returned(number, {item.number: (64, 12.5)})
    assert world.sent() == [Encoded(item.number, [16, 64], "bfloat16", 12.5)]
    assert not world.all_free()
    world.hear(Published(item.number, "stored"))
    assert world.all_free()


@pytest.mark.parametrize("saved", [{}, {1: (65, 1.0)}])
def test_what_was_not_saved_or_has_another_width_is_not_published(saved: dict[int, tuple[int, float]]) -> None:
    world = World()
    world.want("r", wanted())
    [item] = world.asked()
    world.hear(Granted(item.number))
    world.table.allocated(wanted())
    number, _, _ = world.step()
    world.table.step_returned(number, saved)
    assert world.sent() == [Drop([item.number])]
    world.hear(Missing(item.number, "dropped"))
    assert world.all_free()


def test_a_request_that_waits_for_another_engine_gives_its_grants_back_and_asks_again_later() -> None:
    world = World()
    world.want("r", wanted(0), wanted(1))
    first, second = world.asked()
    world.hear(Granted(first.number))
    world.hear(Waiting(second.number))
    assert world.want("r", wanted(0), wanted(1)) == (True, False)
    assert world.sent() == [Drop([first.number])]
    world.hear(Missing(first.number, "dropped"))
    assert world.want("r", wanted(0), wanted(1)) == (True, False)
    assert world.sent() == []  # not while it waits
    world.hear(world.ready(second))
    assert world.want("r", wanted(0), wanted(1)) == (True, False)
    [again] = world.asked()
    world.hear(Granted(again.number))
    assert world.want("r", wanted(0), wanted(1)) == (False, False)


def test_a_grant_that_another_request_can_use_is_kept() -> None:
    world = World()
    world.want("r", wanted(0), wanted(1))
    first, second = world.asked()
    world.want("other", wanted(0))
    world.hear(Granted(first.number))
    world.hear(Waiting(second.number))
    world.want("r", wanted(0), wanted(1))
    assert world.sent() == []
    assert world.want("other", wanted(0)) == (False, False)


def test_a_grant_that_no_step_uses_goes_back() -> None:
    world = World()
    world.want("r", wanted())
    [item] = world.asked()
    world.hear(Granted(item.number))
    world.step()
    assert world.sent() == []
    world.now += GRANT_PATIENCE_S
    world.step()
    assert world.sent() == [Drop([item.number])]


def test_a_granted_item_that_the_engine_holds_already_is_saved_from_there() -> None:
    world = World()
    world.want("r", wanted())
    [item] = world.asked()
    world.hear(Granted(item.number))
    resident = {"id-0": Resident(wanted().key, world.epoch)}
    assert world.step(resident, reaches_workers=False)[2] == []
    [save] = world.step(resident)[2]
    assert save.number == item.number


@pytest.mark.parametrize(
    "resident",
    [
        {},
        {"id-0": Resident(None, 1)},
        {"id-0": Resident(wanted(7).key, 1)},
        {"id-7": Resident(wanted().key, 1)},
        {"id-0": Resident(wanted().key, 0)},
    ],
    ids=["nothing", "not shared", "of another key", "under another name", "since before an invalidation"],
)
def test_what_is_resident_is_not_published_as_what_it_may_not_be(resident: dict[str, Resident]) -> None:
    world = World()
    world.want("r", wanted())
    [item] = world.asked()
    world.hear(Granted(item.number))
    assert world.step(resident)[2] == []
    assert not world.sent()


def test_an_agent_that_does_not_answer_costs_one_deadline_and_then_nothing_until_it_is_heard() -> None:
    world = World()
    world.want("r", wanted())
    [item] = world.asked()
    world.now += FETCH_S + GRACE_S
    assert world.want("r", wanted()) == (False, False)
    assert world.sent() == [Drop([item.number])]
    assert world.want("second", wanted(1)) == (False, False)
    assert world.sent() == []
    world.hear(world.ready(item))  # late: the block is free now, and nothing else
    assert world.all_free()
    assert world.want("third", wanted(2)) == (True, False)


def test_waiting_has_a_longer_deadline() -> None:
    world = World()
    world.want("r", wanted())
    [item] = world.asked()
    world.hear(Waiting(item.number))
    world.now += WAIT_S
    assert world.want("r", wanted()) == (True, False)
    world.now += GRACE_S
    assert world.want("r", wanted()) == (False, False)
    assert world.want("r", wanted(1)) == (True, False)  # the agent has answered: it is not doubted


def test_a_dead_agents_blocks_are_free_and_what_was_to_be_sent_to_it_is_not_sent_to_the_next() -> None:
    world = World()
    world.want("r", wanted(0), wanted(1), wanted(2))
    ready, granted, _ = world.asked()
    world.hear(world.ready(ready))
    world.hear(Granted(granted.number))
    world.table.allocated(wanted(1))
    number, _, _ = world.step()
    world.want("other", wanted(3))
    world.table.agent_died()
    assert world.sent() == []
    assert world.want("r", wanted(0), wanted(1), wanted(2)) == (False, False)
    assert world.table.has(wanted(0))  # it is here, and fresh
    world.table.step_returned(number, {granted.number: (64, 1.0)})
    assert world.sent() == []
    world.table.request_ended("r")
    world.table.request_ended("other")
    assert world.all_free()


def test_what_is_not_fresh_is_not_promised() -> None:
    world = World()
    world.want("r", wanted())
    [item] = world.asked()
    world.hear(world.ready(item))
    world.epoch = 2
    assert not world.table.has(wanted())
    assert world.all_free()
    assert world.want("r", wanted()) == (True, False)  # it is asked for again
    [again] = world.asked()
    world.hear(world.ready(again))
    world.epoch = 3
    assert world.want("r", wanted()) == (True, False)


@pytest.mark.parametrize(("rows", "width", "nbytes"), [(15, 64, 15 * 128), (16, 65, 16 * 130), (16, 64, 2047)])
def test_bytes_of_another_shape_than_the_engine_must_have_are_a_miss(rows: int, width: int, nbytes: int) -> None:
    world = World()
    world.want("r", wanted())
    [item] = world.asked()
    world.hear(Ready(item.number, world.epoch, [rows, width], nbytes, "store"))
    assert world.want("r", wanted()) == (False, False)
    assert not world.table.has(wanted())
    assert world.all_free()


def test_one_uuid_for_two_contents_is_loaded_for_the_one_that_fits_only() -> None:
    world = World()
    world.want("r", wanted())
    [item] = world.asked()
    world.hear(world.ready(item))
    assert world.want("other", wanted(rows=17)) == (False, False)
    assert not world.table.has(wanted(rows=17))
    world.table.allocated(wanted(rows=17))
    assert world.step()[1:] == ([], [])
    assert world.table.has(wanted())


def test_what_this_engine_cannot_encode_is_never_claimed_and_fails_its_request() -> None:
    world = World()
    assert world.want("r", wanted(encodable=False)) == (True, False)
    [item] = world.asked()
    assert not item.claim
    world.hear(Missing(item.number, "absent"))
    assert world.want("r", wanted(encodable=False)) == (True, True)
    assert world.want("private", wanted(1, encodable=False, shared=False)) == (True, True)


def test_what_must_be_had_is_asked_for_again_once_there_is_an_agent() -> None:
    world = World()
    world.want("r", wanted(encodable=False))
    world.asked()
    world.table.agent_died()
    assert world.want("r", wanted(encodable=False), reachable=False) == (True, False)
    assert world.want("r", wanted(encodable=False), reachable=False) == (True, False)
    assert world.asked() == []
    assert world.want("r", wanted(encodable=False)) == (True, False)
    [item] = world.asked()
    world.hear(world.ready(item))
    assert world.want("r", wanted(encodable=False)) == (False, False)
    assert world.table.has(wanted(encodable=False))


def test_but_not_for_ever() -> None:
    world = World()
    assert world.want("r", wanted(encodable=False), reachable=False) == (True, False)
    world.now += FETCH_S
    assert world.want("r", wanted(encodable=False), reachable=False) == (True, True)


def test_a_miss_from_before_a_request_came_does_not_fail_it() -> None:
    world = World()
    world.want("first", wanted(0), wanted(1))
    absent, _ = world.asked()
    world.hear(Missing(absent.number, "absent"))
    assert world.want("first", wanted(0), wanted(1)) == (True, False)
    world.now += 1.0
    assert world.want("second", wanted(0, encodable=False)) == (True, False)
    world.table.request_ended("first")
    assert world.want("second", wanted(0, encodable=False)) == (True, False)
    [again] = world.asked()
    world.hear(Missing(again.number, "absent"))
    assert world.want("second", wanted(0, encodable=False)) == (True, True)


def test_without_room_a_request_waits_and_then_encodes_for_itself() -> None:
    world = World(staging=8192)
    world.want("r", wanted(0), wanted(1))
    assert world.want("other", wanted(2)) == (True, False)
    world.now += FETCH_S
    assert world.want("other", wanted(2)) == (False, False)


def test_a_pure_producer_promises_what_exists_and_loads_nothing() -> None:
    world = World(loads=False)
    world.want("r", wanted())
    [item] = world.asked()
    world.hear(world.ready(item))
    assert world.table.has(wanted())
    world.table.allocated(wanted())
    assert world.step()[1:] == ([], [])
    assert world.all_free()


def test_without_an_agent_nothing_is_asked_for() -> None:
    world = World()
    assert world.want("r", wanted(), reachable=False) == (False, False)
    assert world.sent() == []
    world.table.request_ended("r")
    assert world.want("r", wanted()) == (True, False)


class Machine(RuleBasedStateMachine):
    """Requests come and go, the agent answers as it likes and dies, steps return late."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(staging=12 * 4096)
        self.table = self.world.table
        self.agents: dict[int, Item] = {}  # numbers that the agent has, with their blocks
        self.phase: dict[int, str] = {}
        self.steps: dict[int, list[Copy]] = {}
        self.deferred: dict[str, float] = {}
        self.resident: dict[str, Resident] = {}

    numbers = st.integers(0, 5)
    requests = st.sampled_from(["a", "b", "c"])

    def held(self) -> list[tuple[int, int]]:
        blocks = {item.offset: item.nbytes for item in self.agents.values()}
        blocks.update({copy.offset: copy.nbytes for copies in self.steps.values() for copy in copies})
        return sorted(blocks.items())

    def read_outbox(self) -> None:
        for message in self.world.sent():
            if isinstance(message, Ask):
                for item in message.items:
                    for offset, nbytes in self.held():
                        assert item.offset >= offset + nbytes or offset >= item.offset + item.nbytes
                    self.agents[item.number] = item
                    self.phase[item.number] = "asked"
            elif isinstance(message, Encoded):
                assert self.phase[message.number] == "granted"
                self.phase[message.number] = "encoded"
            elif isinstance(message, Drop):
                for number in message.numbers:
                    if number in self.agents:
                        self.phase[number] = "dropped"

    @rule(request=requests, first=numbers, second=numbers)
    def want(self, request: str, first: int, second: int) -> None:
        items = [wanted(number, rows=8) for number in {first, second}]
        verdict = self.world.want(request, *items)
        self.read_outbox()
        if not verdict[0]:
            self.deferred.pop(request, None)
            for item in items:
                if item.identifier not in self.resident:
                    self.table.has(item)
                    self.table.allocated(item)
                    self.resident[item.identifier] = Resident(item.key, self.world.epoch)
        else:
            self.deferred.setdefault(request, self.world.now)
        number, loads, saves = self.world.step(self.resident)
        self.read_outbox()
        if loads or saves:
            self.steps[number] = [*loads, *saves]

    @rule(request=requests)
    def end(self, request: str) -> None:
        self.table.request_ended(request)
        self.deferred.pop(request, None)
        self.read_outbox()

    @precondition(lambda self: self.agents)
    @rule(
        data=st.data(),
        kind=st.sampled_from(["ready", "odd", "granted", "waiting", "missing", "published", "ready in an old epoch"]),
    )
    def answer(self, data: st.DataObject, kind: str) -> None:
        number = data.draw(st.sampled_from(sorted(self.agents)))
        item, phase = self.agents[number], self.phase[number]
        if kind.startswith("ready") and phase in ("asked", "waiting", "dropped"):
            self.world.hear(self.world.ready(item, epoch=0 if kind.endswith("epoch") else None))
            del self.agents[number]
        elif kind == "odd" and phase in ("asked", "waiting"):
            self.world.hear(self.world.ready(item, width=63))
            del self.agents[number]
        elif kind == "granted" and phase in ("asked", "waiting"):
            self.phase[number] = "granted"
            self.world.hear(Granted(number))
        elif kind == "waiting" and phase == "asked":
            self.phase[number] = "waiting"
            self.world.hear(Waiting(number))
        elif kind == "missing" and phase in ("asked", "waiting", "dropped"):
            self.world.hear(Missing(number, "absent"))
            del self.agents[number]
        elif kind == "published" and phase == "encoded":
            self.world.hear(Published(number, "stored"))
            del self.agents[number]
        self.read_outbox()

    @precondition(lambda self: self.steps)
    @rule(data=st.data(), fails=st.booleans())
    def step_returns(self, data: st.DataObject, fails: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.steps)))
        saved = {} if fails else {copy.number: (64, 1.0) for copy in self.steps[number] if not copy.width}
        del self.steps[number]
        self.table.step_returned(number, saved)
        self.read_outbox()

    @rule()
    def agent_dies(self) -> None:
        self.agents.clear()
        self.table.agent_died()
        self.read_outbox()

    @rule(identifier=numbers)
    def engine_evicts(self, identifier: int) -> None:
        self.resident.pop(f"id-{identifier}", None)

    @rule(seconds=st.sampled_from([0.1, FETCH_S + GRACE_S, WAIT_S + GRACE_S]))
    def time_passes(self, seconds: float) -> None:
        self.world.now += seconds

    @rule()
    def names_change(self) -> None:
        self.world.epoch += 1

    def teardown(self) -> None:
        for request in ("a", "b", "c"):
            self.table.request_ended(request)
        for number in list(self.steps):
            self.table.step_returned(number, {})
        self.table.agent_died()
        assert self.table.free_bytes == 12 * 4096
        assert not self.table._items
        assert not self.table._blocks
        assert not self.table._requests
        assert not self.table._granted


Machine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestItemTable = Machine.TestCase
