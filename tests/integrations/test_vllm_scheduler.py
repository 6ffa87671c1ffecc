"""The scheduler's side, between vLLM's hooks and an agent whose answers the tests give."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mmcache.agent.messages import AgentMessage, Ask, Drop, Encoded, EngineMessage, Granted, Missing, Ready
from mmcache.agent.staging import Staging
from mmcache.integrations.vllm import scheduler
from mmcache.integrations.vllm.item import Wanted
from mmcache.integrations.vllm.items import ItemTable
from mmcache.integrations.vllm.scheduler import IDLE_WAIT_S, SchedulerSide
from mmcache.integrations.vllm.worker import Report, WorkerSide
from mmcache.key import EmbeddingKey

STAGING_BYTES = 1 << 20


def wanted(name: str, *, key: str | None = None, encodable: bool = True) -> Wanted:
    return Wanted(name, EmbeddingKey("model", "1", key or name), 16, (64,), "bfloat16", 2, 100, encodable)


def request_of(name: str, *items: Wanted) -> Any:
    features = [SimpleNamespace(identifier=item.identifier) for item in items]
    return SimpleNamespace(request_id=name, mm_features=features, wanted=list(items))


@dataclass
class Answers:
    """The link to an agent that says what the test puts into `inbox`."""

    sent: list[EngineMessage] = field(default_factory=list)
    inbox: list[AgentMessage] = field(default_factory=list)
    waits: int = 0
    agent_lives: bool = True

    def send(self, message: EngineMessage) -> bool:
        self.sent.append(message)
        return True

    def receive(self) -> Sequence[AgentMessage]:
        received, self.inbox = self.inbox, []
        return received

    def wait(self, _seconds: float) -> bool:
        self.waits += 1
        return bool(self.inbox)

    def take_death(self) -> bool:
        return False

    def ready(self, *numbers: int) -> None:
        self.inbox = [Ready(number, 1, [16, 64], 16 * 64 * 2, "store") for number in numbers]

    def asked(self) -> list[int]:
        sent, self.sent = self.sent, []
        return [item.number for message in sent if isinstance(message, Ask) for item in message.items]


@dataclass
class Engine:
    """As vLLM's scheduler calls the hooks."""

    side: SchedulerSide
    link: Answers
    staging: Staging
    held: set[str] = field(default_factory=set)

    def step(self, *requests: Any, freed: Sequence[str] = ()) -> tuple[list[str], list[str]]:
        """One step with these requests, of those that are not deferred; what its workers load and save."""
        self.held.difference_update(freed)
        runs = False
        for request in requests:
            if not self.side.ensure_available(request, 0):
                continue
            runs = True
            for index, feature in enumerate(request.mm_features):
                if feature.identifier not in self.held:
                    self.side.has(feature.identifier)
                    self.side.allocated(request, index)
                    self.held.add(feature.identifier)
        step = self.side.build_step(freed=freed, reaches_workers=runs)
        if step.loads or step.saves:
            self.side.step_returned(Report(step.number, 1, {copy.number: (64, 1.0) for copy in step.saves}))
        return [copy.identifier for copy in step.loads], [copy.identifier for copy in step.saves]


def side_of(staging: Staging, link: Answers, *, loads: bool, reports: int) -> SchedulerSide:
    """With one worker; requests say themselves what they want."""
    table = ItemTable(STAGING_BYTES, is_fresh=staging.is_fresh, loads=loads, saves=True, fetch_s=60.0, wait_s=60.0)
    return SchedulerSide(
        staging=staging,
        link=link,  # type: ignore[arg-type]
        table=table,
        describe=lambda request: request.wanted,
        can_encode=lambda request: all(item.encodable for item in request.wanted),
        workers=1,
        reports=reports,
    )


@pytest.fixture(params=[True])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """`param`: whether it loads, as all but pure producers do."""
    name = f"test/{uuid.uuid4()}"
    worker = Staging.open_as_worker(name, STAGING_BYTES, 0)
    staging = Staging.open_as_scheduler(name, STAGING_BYTES)
    staging.set_epoch(1)
    staging.set_fresh_until(time.clock_gettime(time.CLOCK_BOOTTIME) + 3600.0)
    link = Answers()
    yield Engine(side_of(staging, link, loads=request.param, reports=1), link, staging)
    staging.close()
    worker.close()


def publish_what_is_held_as(engine: Engine, key: str) -> list[str]:
    """Have "cat" encoded by one request while another asks for it; what a later step saves for that one."""
    cat, dog = wanted("cat"), wanted("dog")
    engine.step(request_of("first", cat))
    [number] = engine.link.asked()
    engine.link.inbox = [Missing(number, "busy")]
    other = request_of("other", wanted("cat", key=key), dog)
    engine.step(request_of("first", cat), other)  # the first encodes it for itself; the other asks for it in that step
    numbers = engine.link.asked()
    engine.link.inbox = [Granted(number) for number in numbers]
    engine.step()
    return [name for name in engine.step(other)[1] if name == "cat"]


def test_a_grant_for_what_the_engine_made_meanwhile_is_published_from_there(engine: Engine) -> None:
    assert publish_what_is_held_as(engine, "cat") == ["cat"]


def test_but_not_under_another_key_of_that_name(engine: Engine) -> None:
    assert publish_what_is_held_as(engine, "cat-of-another-salt") == []


def test_a_step_that_runs_nothing_waits_for_the_agent_while_a_request_is_deferred(engine: Engine) -> None:
    engine.step()
    assert engine.link.waits == 0
    engine.step(request_of("first", wanted("cat")))
    assert engine.link.waits == 1


def test_and_while_it_is_not_known_yet_what_a_request_wants(engine: Engine) -> None:
    unknown = request_of("first")
    unknown.mm_features, unknown.wanted = [SimpleNamespace(identifier="cat")], None
    engine.step(unknown)
    assert engine.link.waits == 1
    engine.step()
    assert engine.link.waits == 1


def test_also_where_there_is_no_agent() -> None:
    table = ItemTable(STAGING_BYTES, is_fresh=lambda _: False, loads=True, saves=True, fetch_s=1.0, wait_s=1.0)
    side = SchedulerSide(
        staging=None,
        link=None,
        table=table,
        describe=lambda _: None,
        can_encode=lambda _: True,
        workers=1,
        reports=1,
    )
    assert not side.ensure_available(request_of("first", wanted("cat")), 0)
    began = time.monotonic()
    side.build_step(freed=(), reaches_workers=False)
    assert time.monotonic() - began >= IDLE_WAIT_S


def test_what_the_engine_holds_but_may_evict_is_here_for_a_request_that_cannot_have_it_encoded(engine: Engine) -> None:
    """vLLM evicts in the pass that schedules the request, and would then run its encoder without an input."""
    named, side = request_of("named", wanted("cat", encodable=False)), engine.side
    engine.step(request_of("first", wanted("cat")))
    engine.link.ready(*engine.link.asked())
    assert engine.step(request_of("first", wanted("cat"))) == (["cat"], [])
    side.request_finished("first")
    assert not side.ensure_available(named, 0)
    engine.link.ready(*engine.link.asked())
    assert side.ensure_available(named, 0)
    engine.held.clear()  # for another item of its own, say
    engine.staging.set_fresh_until(0.0)  # and since a moment ago it could not be asked for any more
    assert side.has("cat")
    side.allocated(named, 0)
    step = side.build_step(freed=(), reaches_workers=True)  # vLLM does not tell of what it has allocated again
    assert [copy.identifier for copy in step.loads] == ["cat"]


def test_nor_does_it_rely_on_what_is_being_loaded_or_encoded(engine: Engine) -> None:
    pictures = [wanted("cat"), wanted("dog"), wanted("owl")]
    others = [request_of(f"with-{picture.identifier}", picture) for picture in pictures]
    named = [request_of(f"named-{it.identifier}", it._replace(encodable=False)) for it in pictures]
    side = engine.side
    engine.step(*others)
    cat, dog, owl = engine.link.asked()
    engine.link.ready(cat)
    engine.link.inbox += [Granted(dog), Granted(owl)]
    for request in others[:2]:  # no room for the third in this step
        assert side.ensure_available(request, 0)
        side.has(request.mm_features[0].identifier)
        side.allocated(request, 0)
    step = side.build_step(freed=(), reaches_workers=True)
    assert len(step.loads) == len(step.saves) == 1
    assert [side.ensure_available(request, 0) for request in named] == [False] * 3
    side.step_returned(Report(step.number, 1, {copy.number: (64, 1.0) for copy in step.saves}))
    assert side.ensure_available(named[0], 0)
    assert side.has("cat")  # without another read


def test_blocks_of_what_a_request_has_by_now_are_free_while_it_goes_on(engine: Engine) -> None:
    free = engine.side._table.free_bytes
    named = request_of("named", wanted("cat", encodable=False), wanted("dog", encodable=False)._replace(end=200))
    engine.step(named)
    engine.link.ready(*engine.link.asked())
    assert engine.step(named) == (["cat", "dog"], [])
    one = free - engine.side._table.free_bytes
    assert engine.side.ensure_available(named, 100)  # the rest of a prompt in chunks, or a decode that vLLM preempted
    assert free - engine.side._table.free_bytes == one // 2
    assert engine.side.ensure_available(named, 200)
    assert engine.side._table.free_bytes == free


def test_items_of_one_request_that_differ_and_have_one_identifier_are_not_shared(engine: Engine) -> None:
    """A client may name an image and a video alike. vLLM allocates the one where it has asked about the other."""
    image = request_of("image", wanted("cat", key="image"))
    engine.step(image)
    engine.link.ready(*engine.link.asked())
    both = request_of("both", wanted("cat", key="image"), wanted("cat", key="video"))
    assert engine.side.ensure_available(both, 0)
    assert not engine.side.has("cat")
    assert engine.link.asked() == []
    named = request_of("named", *(it._replace(encodable=False) for it in both.wanted))
    assert not engine.side.ensure_available(named, 0)
    assert engine.side.take_unavailable() == {"named"}


def test_nothing_is_promised_to_a_request_that_could_not_be_described(engine: Engine) -> None:
    first, other = request_of("first", wanted("cat")), request_of("other", wanted("cat"))
    engine.step(first)
    engine.link.ready(*engine.link.asked())
    assert engine.side.ensure_available(first, 0)
    del other.wanted
    with pytest.raises(AttributeError):  # which the connector survives, and then has the request scheduled
        engine.side.ensure_available(other, 0)
    assert not engine.side.has("cat")


def test_after_a_fault_a_request_is_encoded_here_or_where_that_cannot_be_fails_alone(engine: Engine) -> None:
    assert engine.side.available_without(request_of("pixels", wanted("cat")))
    assert not engine.side.available_without(request_of("metadata", wanted("cat"), wanted("dog", encodable=False)))
    assert engine.side.take_unavailable() == {"metadata"}


def test_what_an_engine_holds_is_forgotten_in_time_also_where_it_does_not_tell_what_it_frees(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each `/reset_encoder_cache` leaves what was held until then."""
    monkeypatch.setattr(scheduler, "MAX_RESIDENT", 4)
    for number in range(8):
        engine.side.allocated(request_of("r", wanted(f"cat-{number}")), 0)
        engine.side.build_step(freed=(), reaches_workers=True)
    assert sorted(engine.side._resident) == [f"cat-{number}" for number in range(4, 8)]


def test_a_request_that_has_ended_is_not_told_to_be_unavailable(engine: Engine) -> None:
    engine.link.agent_lives = False
    assert not engine.side.ensure_available(request_of("r", wanted("cat", encodable=False)), 0)
    engine.side.request_finished("r")
    assert engine.side.take_unavailable() == set()


@dataclass
class Producer:
    """A pure producer, of whose workers' reports vLLM's first model runner lets none through, and its only worker."""

    side: SchedulerSide
    link: Answers
    worker: WorkerSide
    requests: int = 0

    def encode(self, cache: dict[str, torch.Tensor], *items: Wanted) -> list[Encoded]:
        """What is to be published when a step has returned that the agent wants all of these from."""
        self.requests += 1
        request = request_of(f"request-{self.requests}", *items)
        assert not self.side.ensure_available(request, 0)
        self.link.inbox = [Granted(number) for number in self.link.asked()]
        assert self.side.ensure_available(request, 0)
        for index, item in enumerate(items):
            assert not self.side.has(item.identifier)
            self.side.allocated(request, index)
        self.worker.begin(self.side.build_step(freed=(), reaches_workers=True))
        for item in items:
            self.worker.save(cache, item.identifier)
        assert self.side.take_unavailable() == set()
        assert self.link.sent == [], "the step has not returned"
        self.worker.end()
        self.side.take_unavailable()
        encoded = [message for message in self.link.sent if isinstance(message, Encoded)]
        self.side.request_finished(request.request_id)
        return encoded


@pytest.fixture
def producer() -> Iterator[Producer]:
    name = f"test/{uuid.uuid4()}"
    worker = WorkerSide(name, STAGING_BYTES, 0, "cpu")
    staging = Staging.open_as_scheduler(name, STAGING_BYTES)
    link = Answers()
    yield Producer(side_of(staging, link, loads=False, reports=0), link, worker)
    staging.close()
    worker.close()


def test_what_a_pure_producer_has_saved_is_published_though_its_workers_reports_are_dropped(producer: Producer) -> None:
    cache = {"cat": torch.zeros(16, 64, dtype=torch.bfloat16), "dog": torch.ones(16, 64, dtype=torch.bfloat16)}
    published = producer.encode(cache, wanted("cat"), wanted("dog"))
    assert [(message.shape, message.cost_ms > 0.0) for message in published] == [([16, 64], True)] * 2
    [bird] = producer.encode({"bird": cache["cat"]}, wanted("bird"))
    assert bird.number not in [message.number for message in published]


def test_and_what_it_could_not_save_is_given_up(producer: Producer) -> None:
    cache = {"cat": torch.zeros(15, 64, dtype=torch.bfloat16), "dog": torch.zeros(16, 64, dtype=torch.bfloat16)}
    [dog] = producer.encode(cache, wanted("cat"), wanted("dog"))
    counts = producer.side.take_counts()
    assert counts["not_saved"] == 1
    assert [message.numbers != [dog.number] for message in producer.link.sent if isinstance(message, Drop)] == [True]


@pytest.mark.parametrize("engine", [False], indirect=True)
def test_an_encoder_publishes_what_it_holds_again_where_others_do_not_find_it_any_more(engine: Engine) -> None:
    engine.step(request_of("first", wanted("cat")))
    engine.link.inbox = [Granted(number) for number in engine.link.asked()]
    engine.step()
    assert engine.step(request_of("first", wanted("cat"))) == ([], ["cat"])
    engine.side.request_finished("first")
    again = request_of("again", wanted("cat"))
    assert not engine.side.ensure_available(again, 0)
    engine.link.inbox = [Granted(number) for number in engine.link.asked()]
    assert engine.step(again) == ([], ["cat"])
