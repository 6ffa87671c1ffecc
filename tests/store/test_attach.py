"""Attaching: which way, in what order things are checked, and that what is absent or hangs costs seconds at most."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import closing

import pytest
from buffers import Buffers, fresh
from cluster import MooncakeProcesses, free_port
from stores import mooncake_store

from mmcache.config import StoreSettings
from mmcache.errors import ConfigError, StoreUnavailable
from mmcache.store import binding
from mmcache.store import mooncake as mooncake_module
from mmcache.store.base import Outcome, ReadResult
from mmcache.store.mooncake import MooncakeStore


def attach(master: str, sidecar: str | None, kind: str = "auto", timeout: float = 1.0) -> MooncakeStore:
    return MooncakeStore.attach(master=master, sidecar=sidecar, attach=kind, region_bytes=4096, timeout=timeout)


def nowhere() -> str:
    return f"127.0.0.1:{free_port()}"


def test_auto_takes_the_sidecar_that_answers(mooncake: MooncakeProcesses) -> None:
    with closing(attach(mooncake.master.address, mooncake.owners[0].address)) as store:
        assert store.kind == "sidecar"
        assert store._binding.health_check() == 0, "until its first ping it refuses every call"


def test_every_setting_arrives(mooncake: MooncakeProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, str] = {}
    monkeypatch.setattr("mmcache.store.mooncake.set_up_embedded", lambda **arguments: given.update(arguments))
    client = {"metadata": "etcd://a", "protocol": "rdma", "devices": "mlx5_0", "hostname": "10.0.0.1"}
    addresses = {"master": mooncake.master.address, "sidecar": mooncake.owners[0].address}
    settings = StoreSettings(attach="embedded", lease=7.0, **addresses, **client)
    store = MooncakeStore.from_settings(settings, region_bytes=4096, timeout=1.0)
    assert (store.kind, store.lease_s) == ("embedded", 7.0)
    assert given == {"master": addresses["master"], **client}


@pytest.mark.parametrize("dead", [False, True], ids=["no sidecar", "a dead sidecar"])
def test_auto_is_embedded_without_a_sidecar(mooncake: MooncakeProcesses, dead: bool) -> None:
    with closing(attach(mooncake.master.address, nowhere() if dead else None)) as store:
        assert store.kind == "embedded"


@pytest.mark.parametrize("kind", ["auto", "sidecar", "embedded"])
def test_no_master_is_unavailable_at_once(mooncake: MooncakeProcesses, kind: str) -> None:
    started = time.monotonic()
    master = nowhere()
    with pytest.raises(StoreUnavailable, match=master):
        attach(master, mooncake.owners[0].address, kind, timeout=5.0)
    assert time.monotonic() - started < 1


def test_a_sidecar_that_was_asked_for_and_is_dead_is_unavailable(mooncake: MooncakeProcesses) -> None:
    sidecar = nowhere()
    with pytest.raises(StoreUnavailable, match=sidecar):
        attach(mooncake.master.address, sidecar, "sidecar")


@pytest.mark.parametrize("kind", ["sidecar", "embedded"])
def test_a_process_that_hangs_is_unavailable_within_the_timeout(kind: str) -> None:
    with MooncakeProcesses() as processes:
        hanging = processes.start_master()
        sidecar = processes.start_owner(0)
        if kind == "sidecar":
            hanging = sidecar
        with hanging.stopped():
            started = time.monotonic()
            with pytest.raises(StoreUnavailable, match=hanging.address):
                attach(processes.master.address, sidecar.address, kind, timeout=0.5)
            assert time.monotonic() - started < 3, "attaching to it would take Mooncake 30 s, with the GIL"


@pytest.mark.parametrize(("kind", "sidecar"), [("sidecar", None), ("dummy", "127.0.0.1:1")])
def test_contradictory_settings_are_refused(kind: str, sidecar: str | None) -> None:
    with pytest.raises(ConfigError, match="attach"):
        attach("127.0.0.1:1", sidecar, kind)


@pytest.mark.parametrize(
    ("message", "advice"),
    [
        ("libibverbs.so.1: cannot open shared object file", "libibverbs1 librdmacm1 libnuma1"),
        ("libcuda.so.1: cannot open shared object file", r"mmcache\[cpu\]"),
        ("undefined symbol", "undefined symbol"),
    ],
)
def test_a_mooncake_that_cannot_be_imported_is_explained(
    mooncake: MooncakeProcesses, monkeypatch: pytest.MonkeyPatch, message: str, advice: str
) -> None:
    class Broken:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "mooncake.store":
                raise ImportError(message)

    monkeypatch.delitem(sys.modules, "mooncake.store", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with pytest.raises(StoreUnavailable, match=advice):
        attach(mooncake.master.address, None)


def test_a_missing_mooncake_names_the_extras(mooncake: MooncakeProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmcache.store.launch.importlib.util.find_spec", lambda _name: None)
    with pytest.raises(StoreUnavailable, match=r"mmcache\[cpu\]"):
        attach(mooncake.master.address, None)


def test_the_module_is_imported_only_to_attach() -> None:
    code = "import sys, mmcache.store.mooncake; sys.exit(any(name.split('.')[0] == 'mooncake' for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize("kind", ["sidecar", "embedded"])
def test_an_attached_process_says_nothing_and_exits_cleanly(mooncake: MooncakeProcesses, kind: str) -> None:
    code = f"""
from mmcache.store.mooncake import MooncakeStore
store = MooncakeStore.attach(master={mooncake.master.address!r}, sidecar={mooncake.owners[0].address!r},
                             attach={kind!r}, region_bytes=8192)
region = store.allocate_region(8192)
deadline = float("inf")
store.put_from([{(name := fresh())!r}], [region.address], [8192], deadline=deadline)
print(store.read_into([{name!r}, "absent"], [region.address, region.address + 4096], [4096] * 2, deadline=deadline))
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MC_", "GLOG_"))}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0
    assert done.stdout.count("TOO_SMALL") == done.stdout.count("NOT_FOUND") == 1
    assert done.stderr == ""


def test_variables_that_the_user_set_are_kept(mooncake: MooncakeProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_RPC_TIMEOUT_MS", "1234")
    attach(mooncake.master.address, None).close()
    assert os.environ["MC_RPC_TIMEOUT_MS"] == "1234"
    assert os.environ["MC_STORE_CLIENT_SETUP_RETRIES"] == "1"


def test_a_read_slower_than_the_lease_is_discarded(mooncake: MooncakeProcesses) -> None:
    with closing(mooncake_store(mooncake, "sidecar", lease_s=0.0)) as store:
        region = Buffers(store, 8192)
        name = fresh()
        region.put({name: b"x" * 100})
        assert region.read(name, 100)[0] == ReadResult(Outcome.LEASE_EXPIRED, 0, settled=True)
        store.lease_s = 10.0
        region.assert_readable(name, b"x" * 100)


def test_closed_clients_are_let_go(mooncake: MooncakeProcesses) -> None:
    before = len(binding._kept)
    store = attach(mooncake.master.address, mooncake.owners[0].address, "sidecar")
    assert len(binding._kept) == before + 1
    store.close()
    assert len(binding._kept) == before


def test_nor_is_one_kept_whose_sidecar_answers_no_ping(
    mooncake: MooncakeProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    def give_up(_client: object, address: str, *, timeout: float) -> None:
        raise StoreUnavailable(f"{address}: nothing in {timeout} s")

    monkeypatch.setattr(mooncake_module, "wait_for_ping", give_up)
    before = len(binding._kept)
    with pytest.raises(StoreUnavailable, match="nothing in"):
        attach(mooncake.master.address, mooncake.owners[0].address, "sidecar")
    assert len(binding._kept) == before
