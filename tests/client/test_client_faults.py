"""No fault below raises into a caller, keeps it past its deadline, or shows it a byte that was not published."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path

import pytest
import torch
from cluster import free_port, wait_until
from serving import Serving, key_of, store_of

from mmcache import ControllerUnavailable, LifecycleError, MMCache, StoreUnavailable
from mmcache.client import attachment


def quick(started: float, deadline: float) -> bool:
    """Within a deadline, with room for a machine that is busy with other tests."""
    return time.monotonic() - started < deadline + 3.0


def config_for(folder: Path, serving: Serving, *, master: str | None = None, control: str | None = None) -> Path:
    path = folder / "client.yaml"
    path.write_text(
        f"store: {{master: '{master or serving.store.master.address}'}}\n"
        f"control: {{address: '{control or serving.controller.address}'}}\n"
        "client: {pool_bytes: 4MiB, connect_timeout: 1s, read_timeout: 500ms, publish_timeout: 500ms}\n"
    )
    return path


def test_without_a_controller_reads_miss_puts_drop_and_computing_goes_on(serving: Serving, tmp_path: Path) -> None:
    path = config_for(tmp_path, serving, control=f"tcp://127.0.0.1:{free_port()}")
    with MMCache.connect(path) as cache:
        started = time.monotonic()
        assert cache.get(key_of(1)) is None
        assert cache.put(key_of(1), torch.ones(1)) == ("dropped", "not_fresh")
        assert cache.get_or_compute(key_of(1), lambda: torch.ones(1)).source == "computed"
        assert cache.lookup([key_of(1)]) == [None]
        assert quick(started, 0.5)
        assert cache.stats()["miss.not_fresh"] == 2
    with pytest.raises(ControllerUnavailable):
        MMCache.connect(path, strict=True)


def test_without_a_store_reads_miss_puts_drop_and_computing_goes_on(serving: Serving, tmp_path: Path) -> None:
    path = config_for(tmp_path, serving, master=f"127.0.0.1:{free_port()}")
    with MMCache.connect(path) as cache:
        started = time.monotonic()
        assert cache.get(key_of(2)) is None
        assert cache.put(key_of(2), torch.ones(1)) == ("dropped", "unavailable")
        assert cache.get_or_compute(key_of(2), lambda: torch.ones(1)).source == "computed"
        assert tuple(cache.empty((3,)).shape) == (3,)
        assert quick(started, 0.5)
        assert cache.stats()["store.attached"] == 0
    with pytest.raises(StoreUnavailable):
        MMCache.connect(path, strict=True)


def test_a_full_store_drops_and_counts_and_callers_get_what_they_compute() -> None:
    with Serving(segment_bytes=16 << 20) as serving:
        cache = serving.connect(local_entries=False, wait_timeout=5.0)
        results = [cache.put(key_of(number), torch.full((1 << 20,), float(number))) for number in range(8)]
        assert any(result == ("dropped", "no_space") for result in results)
        assert all(result == ("dropped", "no_space") or result.status == "stored" for result in results)
        assert cache.stats()["put.no_space"] == results.count(("dropped", "no_space"))
        assert cache.put(key_of("giant"), torch.ones(6 << 20)) == ("dropped", "no_space")
        embedding = cache.get_or_compute(key_of("giant"), lambda: torch.ones(6 << 20))
        assert embedding.source == "computed"
        for number, result in enumerate(results):
            found = cache.get(key_of(number))
            assert found is None or (result.readable and found.tensor[0] == number)


def test_a_restarted_controller_is_found_again_and_nothing_old_is_served(fresh_serving: Serving) -> None:
    cache = fresh_serving.connect()
    assert cache.put(key_of(1), torch.ones(1)).readable
    fresh_serving.controller.kill()
    wait_until(lambda: cache.stats()["session.fresh"] == 0, timeout=10, what="the end of freshness")
    assert cache.get(key_of(1)) is None
    assert cache.get_or_compute(key_of(1), lambda: torch.full((1,), 2.0)).tensor.item() == 2.0
    fresh_serving.controller.start()
    wait_until(lambda: cache.stats()["session.fresh"] == 1, timeout=10, what="a new session")
    assert cache.get(key_of(1)) is None, "a new controller is a new lineage"
    assert cache.put(key_of(1), torch.full((1,), 3.0)).status == "stored"
    found = fresh_serving.connect().get(key_of(1))
    assert found is not None
    assert found.tensor.item() == 3.0


def test_a_master_that_dies_makes_misses_within_the_deadline(fresh_serving: Serving) -> None:
    cache = fresh_serving.connect(local_entries=False, read_timeout=1.0, publish_timeout=1.0)
    assert cache.put(key_of(1), torch.ones(1)).readable
    fresh_serving.store.master.kill()
    for _ in range(3):
        started = time.monotonic()
        assert cache.get(key_of(1)) is None
        assert quick(started, 1.0)
        started = time.monotonic()
        assert not cache.put(key_of(2), torch.ones(1)).readable
        assert quick(started, 1.0)
    assert cache.get_or_compute(key_of(3), lambda: torch.ones(1)).source == "computed"


def test_a_put_that_the_controller_does_not_confirm_is_dropped(fresh_serving: Serving) -> None:
    cache = fresh_serving.connect(publish_timeout=1.0)
    put_from = store_of(cache).put_from

    def put_and_lose_the_controller(*arguments, **named):
        results = put_from(*arguments, **named)
        fresh_serving.controller.kill()
        return results

    store_of(cache).put_from = put_and_lose_the_controller
    started = time.monotonic()
    assert cache.put(key_of(1), torch.ones(1)) == ("dropped", "uncommitted")
    assert quick(started, 1.0)
    assert cache.stats()["put.uncommitted"] == 1
    assert not cache.stats().get("put.stored")


def test_a_sidecar_that_dies_makes_misses_within_the_deadline(fresh_serving: Serving) -> None:
    cache = fresh_serving.connect(local_entries=False, read_timeout=1.0, publish_timeout=1.0)
    assert cache.put(key_of(1), torch.ones(1)).readable
    fresh_serving.sidecar.kill()
    for _ in range(3):
        started = time.monotonic()
        assert cache.get(key_of(1)) is None
        assert quick(started, 1.0)
    assert cache.get_or_compute(key_of(3), lambda: torch.ones(1)).source == "computed"


def test_a_sidecar_that_is_restarted_is_attached_to_again(fresh_serving: Serving) -> None:
    cache = fresh_serving.connect(local_entries=False)
    assert cache.put(key_of(1), torch.ones(1)).readable
    held = cache.get(key_of(1))
    fresh_serving.sidecar.kill()
    fresh_serving.store.restart(fresh_serving.sidecar)
    wait_until(lambda: cache.put(key_of(2), torch.full((1,), 2.0)).readable, timeout=30, what="a put after the restart")
    found = cache.get(key_of(2))
    assert found is not None
    assert found.tensor.item() == 2.0
    assert held is not None
    assert held.tensor.item() == 1.0


@pytest.mark.parametrize("gives_up", [False, True], ids=["the store still waits", "the store gave up"])
def test_a_read_whose_remote_owner_is_stopped_ends_at_its_deadline_and_changes_no_block_later(
    fresh_serving: Serving, gives_up: bool
) -> None:
    """MOONCAKE's trap: the transfer goes on after the read has failed, and lands when the owner continues."""
    store = fresh_serving.store
    remote = fresh_serving.sidecar
    near = store.start_owner(0)  # lends nothing: all bytes lie with the remote owner
    floats = 1 << 20
    writer = fresh_serving.connect(fresh_serving.write_config("remote.yaml"))
    assert writer.put(key_of("remote"), torch.full((floats,), 1.0)).readable
    reader = fresh_serving.connect(
        fresh_serving.write_config("near.yaml", sidecar=near.address), local_entries=False, pool_bytes=32 << 20
    )
    assert reader.get(key_of("remote")) is not None
    with remote.stopped():
        started = time.monotonic()
        assert reader.get(key_of("remote"), timeout=1.0) is None
        assert time.monotonic() - started > 0.9
        assert quick(started, 1.0)
        assert reader.stats()["miss.deadline"] == 1
        # Blocks handed out meanwhile, over all that is left of the pool.
        handed_out = []
        while True:
            tensor = reader.empty((floats // 2,))
            if reader.stats().get("empty_outside_pool.PoolExhausted"):
                break
            handed_out.append(tensor.fill_(float(len(handed_out) + 2)))
        assert len(handed_out) > 4
        if gives_up:  # the owner is stopped for longer than the store itself waits for the transfer
            wait_until(lambda: reader.stats()["pool.quarantined"] > 0, timeout=60, what="the end of the store's call")
    wait_until(
        lambda: reader.stats()["pool.held_blocks"] == len(handed_out), timeout=60, what="the end of the late transfer"
    )
    # A fence: what reaches the pool of this near client after the owner's late bytes, and by the same way.
    assert writer.put(key_of("fence"), torch.full((1000,), 7.0)).readable
    wait_until(lambda: reader.get(key_of("fence"), timeout=2.0) is not None, timeout=20, what="a read through the near")
    fence = reader.get(key_of("fence"), timeout=10.0)
    assert fence is not None
    assert torch.equal(fence.tensor, torch.full((1000,), 7.0))
    for number, tensor in enumerate(handed_out):
        assert torch.equal(tensor, torch.full_like(tensor, float(number + 2))), (
            "a block was overwritten after its reuse"
        )


def test_a_pool_worn_out_by_quarantine_is_replaced_and_old_tensors_keep_their_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attachment, "SHORTEST_LIFE_SECONDS", 0.0)
    # A stopped owner keeps what it holds for as long as the master takes it to be alive.
    with Serving(segment_bytes=64 << 20, master_options=("--client_ttl=120",)) as serving:
        near = serving.store.start_owner(0)
        writer = serving.connect(serving.write_config("remote.yaml"))
        values = {number: torch.full((150_000,), float(number)) for number in range(3)}
        for number, value in values.items():
            assert writer.put(key_of(number), value).readable
        reader = serving.connect(
            serving.write_config("near.yaml", sidecar=near.address), local_entries=False, pool_bytes=1_500_000
        )
        held = reader.get(key_of(0))
        assert held is not None
        worn_out = reader._attacher.current
        with serving.sidecar.stopped():
            assert reader.get(key_of(1), timeout=0.5) is None
            wait_until(lambda: reader._attacher.current is not worn_out, timeout=60, what="the end of the attachment")
        wait_until(lambda: reader.get(key_of(2)) is not None, timeout=20, what="a read through fresh memory")
        assert torch.equal(held.tensor, values[0])
        assert reader.stats()["attachment_lost"] == 1


def _use_in_child(cache: MMCache, outcome: multiprocessing.Queue[str]) -> None:
    try:
        cache.get(key_of(1))
        outcome.put("no error")
    except LifecycleError as error:
        outcome.put(str(error))


def test_a_cache_is_refused_in_a_forked_child_with_a_clear_error(serving: Serving) -> None:
    cache = serving.connect()
    context = multiprocessing.get_context("fork")
    outcome = context.Queue()
    child = context.Process(target=_use_in_child, args=(cache, outcome))
    child.start()
    assert "connect after fork" in outcome.get(timeout=20)
    child.join(timeout=20)
    assert child.exitcode == 0
    assert cache.put(key_of("parent"), torch.ones(1)).readable
