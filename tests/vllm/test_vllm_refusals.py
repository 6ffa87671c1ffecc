"""What an engine is told wrongly: it says so when it starts, or runs without the cache; it is never ended by it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread

import pytest
import zmq
from vllm_caches import EXACT, Pictures, expect, figure, options
from vllm_engines import EngineFailed, LocalEngine, Options, Picture, Request, started

from benchmarks.parts import Parts
from mmcache.control import messages
from mmcache.key import MM_HASH_MAX_BYTES

pictures = Pictures(6000)


@pytest.fixture(scope="module")
def engines(model, cluster: Parts, both: list[LocalEngine]) -> Iterator[tuple[LocalEngine, LocalEngine]]:
    """One that encodes and loads, and one that only loads."""
    consumer = LocalEngine(options(model("vision"), cluster.config, "ec_consumer"), name="ec_consumer")
    with started(consumer):
        yield both[0], consumer


@pytest.mark.parametrize(
    "uuid",
    ["x" * (1 << 20), "é" * MM_HASH_MAX_BYTES],
    ids=["a megabyte", "two KiB of UTF-8"],
)
def test_an_identifier_that_cannot_be_one_is_not_shared(
    engines: tuple[LocalEngine, LocalEngine], plain: LocalEngine, uuid: str
) -> None:
    request = Request([pictures(), "what is it?"], uuids=[uuid])
    for engine in engines:
        encoded, not_shared = engine.encoded(), figure(engine, "not_shared")
        expect(engine, plain, request)
        assert engine.encoded() == encoded + 1
        assert figure(engine, "not_shared") == not_shared + 1


@pytest.mark.parametrize("uuid", ["/", "../..", "/etc/passwd", "a//b", "~", "nul\0", "new\nline", "%2e%2e", "ü/☃"])
def test_an_identifier_is_never_a_path(engines: tuple[LocalEngine, LocalEngine], plain: LocalEngine, uuid: str) -> None:
    producer, consumer = engines
    request = Request([pictures(), "what is it?"], uuids=[uuid])
    encoded = consumer.encoded()
    expect(producer, plain, request)
    expect(consumer, plain, request)
    assert consumer.encoded() == encoded


def test_an_identifier_of_another_picture_with_other_embeddings_is_encoded(
    engines: tuple[LocalEngine, LocalEngine], plain: LocalEngine
) -> None:
    producer, consumer = engines
    expect(producer, plain, Request([pictures(), "what is it?"], uuids=["one for two"]))
    encoded = consumer.encoded()
    plain.reset()
    expect(consumer, plain, Request([pictures(width=112), "what is it?"], uuids=["one for two"]))
    assert consumer.encoded() == encoded + 1
    plain.reset()
    consumer.reset()
    expect(consumer, plain, Request([pictures(width=168), "what is it?"], uuids=["one for two"]))


def test_random_identifiers_are_not_shared_and_advice_is_given(
    model, cluster: Parts, plain: LocalEngine, stack: contextlib.ExitStack
) -> None:
    made = options(model("vision"), cluster.config, "ec_both", mm_processor_cache_gb=0)
    engine = LocalEngine(made, name="random")
    stack.enter_context(started(engine))
    picture = pictures()
    expect(engine, plain, Request([picture, "what is it?"]), Request([picture, "and now?"]))
    assert engine.encoded() == 2
    assert figure(engine, "not_shared") == 2
    assert "mm_processor_cache_gb" in engine.log.read_text(errors="replace")
    expect(engine, plain, Request([picture, "named"], uuids=["a name"]))
    assert figure(engine, "not_shared") == 2


def fails(made: Options, name: str) -> str:
    """What an engine that does not start says."""
    engine = LocalEngine(made, name=name)
    try:
        with pytest.raises(EngineFailed) as failed:
            engine.wait_ready()
        return str(failed.value)
    finally:
        engine.end()


def test_an_unknown_role_is_refused(model, cluster: Parts) -> None:
    log = fails(options(model("vision"), cluster.config, "ec_spectator"), "role")
    assert "ec_spectator" in log
    assert "ec_producer" in log


def test_a_missing_configuration_file_is_refused_by_name(model, tmp_path: Path) -> None:
    missing = tmp_path / "nowhere.yaml"
    log = fails(options(model("vision"), missing, "ec_both"), "missing")
    assert str(missing) in log
    assert "No such file" in log


def test_a_wrong_configuration_file_is_refused_with_its_line(model, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("store:\n  master: 127.0.0.1:1\n  sidecra: 127.0.0.1:2\n")
    log = fails(options(model("vision"), wrong, "ec_both"), "wrong")
    assert f"{wrong}:3" in log
    assert "did you mean store.sidecar" in log


def test_an_unknown_setting_is_refused_with_the_one_that_was_meant(model, cluster: Parts) -> None:
    log = fails(options(model("vision"), cluster.config, "ec_both", extra={"fetch_timeuot": 1}), "setting")
    assert "did you mean fetch_timeout" in log


class OtherController:
    """A controller of the next version of the protocol: it refuses whoever says hello."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.bind("tcp://127.0.0.1:0")
        self.address = self._socket.get_string(zmq.LAST_ENDPOINT)
        self.asked = Event()
        self._ending = Event()
        self._thread = Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ending.is_set():
            if self._socket.poll(50):
                peer, _ = self._socket.recv_multipart()
                self.asked.set()
                refusal = messages.Refused(0, f"this controller speaks version {messages.PROTOCOL_VERSION + 1}")
                self._socket.send_multipart([peer, messages.encode(refusal)])

    def close(self) -> None:
        self._ending.set()
        self._thread.join()
        self._context.destroy(linger=0)


def test_with_a_controller_of_another_version_an_engine_runs_without_the_cache(
    model, cluster: Parts, plain: LocalEngine, stack: contextlib.ExitStack, tmp_path: Path
) -> None:
    controller = OtherController()
    stack.callback(controller.close)
    config = tmp_path / "client.yaml"
    config.write_text(
        json.dumps({**json.loads(cluster.config.read_text()), "control": {"address": controller.address}})
    )
    engine = LocalEngine(options(model("vision"), config, "ec_both", extra={"connect_timeout": 1.0}), name="other")
    stack.enter_context(started(engine))
    assert controller.asked.wait(60)
    expect(engine, plain, Request([pictures(), "what is it?"]), Request(["no picture"]))


def test_a_prefill_instance_of_another_model_string_says_so(
    model, cluster: Parts, engines: tuple[LocalEngine, LocalEngine], stack: contextlib.ExitStack, tmp_path: Path
) -> None:
    link = tmp_path / "the-same-model-by-another-name"
    link.symlink_to(model("vision"))
    other = LocalEngine(options(str(link), cluster.config, "ec_consumer"), name="renamed")
    alone = LocalEngine(Options(str(link), arguments=EXACT), name="renamed-plain")
    stack.enter_context(started(other, alone))
    picture: Picture = pictures()
    [primed] = engines[0].generate(Request([picture], max_tokens=1))
    assert primed.ec_transfer_params
    request = Request([picture, "what is it?"], ec_transfer_params=primed.ec_transfer_params)
    for _ in range(2):
        other.reset()
        expect(other, alone, Request(request.parts, ec_transfer_params=request.ec_transfer_params))
    log = other.log.read_text(errors="replace")
    assert model("vision") in log
    assert log.count("nothing is shared") == 1
    assert figure(other, 'mismatches{what="other_model"}') == 2
