"""Packets that vanish between hosts, and a controller that is far away: no RST and no FIN tells anybody."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import namespaces
import pytest
from namespaces import CLIENT_ADDRESS, SERVER_ADDRESS, Network, answers
from relay import Relay
from verdict import hold_nothing, no_more_than, serve_again, unharmed

from benchmarks.fault_engine import Engine
from benchmarks.fault_load import Options
from benchmarks.parts import Part, Parts
from mmcache.store.launch import master_command, owner_command

OPTIONS = Options(timeout=0.5, burst=4, pause=0.04, nbytes=16 << 10, pool_bytes=8 << 20)
MASTER, METRICS, OWNER, SIDECAR, CONTROL = range(20_001, 20_006)  # namespaces of our own: nobody else is there
OUTAGE_SECONDS = 6.0


class Hosts(NamedTuple):
    network: Network
    engines: list[Engine]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    """Master, memory and controller on one host; on the other, engines and the sidecar that one of them attaches to."""
    if reason := namespaces.why_not():
        pytest.skip(reason)
    with contextlib.ExitStack() as stack:
        network = Network(stack)
        server, client = network.server.within, network.client.within
        master = f"{SERVER_ADDRESS}:{MASTER}"
        commands = {
            "master": (server, MASTER, master_command(rpc_port=MASTER, metrics_port=METRICS, host=SERVER_ADDRESS)),
            "owner": (
                server,
                OWNER,
                owner_command(master=master, port=OWNER, segment_bytes=256 << 20, host=SERVER_ADDRESS),
            ),
            "sidecar": (
                client,
                SIDECAR,
                owner_command(master=master, port=SIDECAR, segment_bytes=0, host=CLIENT_ADDRESS),
            ),
            "controller": (
                server,
                CONTROL,
                [sys.executable, "-m", "mmcache.cli", "controller", "--bind", f"tcp://{SERVER_ADDRESS}:{CONTROL}"],
            ),
        }
        for name, (within, port, command) in commands.items():
            address = f"{CLIENT_ADDRESS if within is client else SERVER_ADDRESS}:{port}"

            def ready(within: list[str] = within, address: str = address) -> bool:
                return answers(within, sys.executable, address)

            part = Part(name, [*within, *command], address=address, folder=tmp_path, ready=ready)
            stack.callback(part.kill)
            part.start()
        engines = []
        for attach in ("sidecar", "embedded"):
            config = tmp_path / f"client-{attach}.yaml"
            store = {"master": master, "sidecar": f"{CLIENT_ADDRESS}:{SIDECAR}", "hostname": CLIENT_ADDRESS}
            control = {"address": f"tcp://{SERVER_ADDRESS}:{CONTROL}"}
            config.write_text(json.dumps({"store": {**store, "attach": attach}, "control": control}))
            engines.append(stack.enter_context(Engine(config, OPTIONS, within=client)))
        for engine in engines:
            engine.wait_ready()
        yield Hosts(network, engines)


def test_packets_that_vanish_cost_misses_until_they_arrive_again(hosts: Hosts) -> None:
    before = hold_nothing(hosts.engines)
    with hosts.network.cut():
        time.sleep(OUTAGE_SECONDS)
        for engine in hosts.engines:
            engine.tell("watch", seconds=OPTIONS.timeout)
        for engine in hosts.engines:
            said = engine.hear(30.0)
            unharmed(said, OPTIONS)
            assert not said["back"], "packets still arrive"
    serve_again(hosts.engines, OPTIONS)
    no_more_than(before, hold_nothing(hosts.engines))


def test_a_controller_that_is_far_away_serves_and_one_that_is_too_far_is_missed_until_it_is_nearer() -> None:
    with contextlib.ExitStack() as stack:
        relays: dict[str, Relay] = {}

        def via(name: str, address: str) -> str:
            relays[name] = stack.enter_context(Relay(address))
            return relays[name].address

        parts = stack.enter_context(Parts(owner_bytes=256 << 20, via=via))
        engine = stack.enter_context(Engine(parts.config_for("sidecar"), OPTIONS))
        engine.wait_ready()
        relays["controller"].delay = OPTIONS.timeout / 10
        serve_again([engine], OPTIONS)
        relays["controller"].delay = 2 * OPTIONS.timeout  # and as long for the answer
        said = engine.ask("watch", seconds=3.0, within_seconds=30.0)
        unharmed(said, OPTIONS)
        assert not said["back"], "calls that the controller must answer succeed before it can"
        relays["controller"].delay = 0.0
        serve_again([engine], OPTIONS)
