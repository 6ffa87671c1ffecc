"""Clients of a controller with keys: who has the right ones is served, and everybody else hears why not."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cluster import wait_until
from secured import LONG, SESSION_TTL, Secured, wait_for
from serving import Serving, key_of

from mmcache import MMCache
from mmcache.config import load
from mmcache.control.channel import ControlChannel
from mmcache.control.curve import client_keys
from mmcache.errors import ConfigError, ControllerUnavailable, MMCacheError


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    with Serving(segment_bytes=64 << 20) as serving:
        yield serving


@pytest.fixture(scope="module")
def secured(serving: Serving, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    controller = Secured(serving, tmp_path_factory.mktemp("secured"))
    yield controller
    controller.close()


def channel_of(config: Path) -> ControlChannel:
    settings = load(config, environ={})
    return ControlChannel(settings.control.address, name="test", keys=client_keys(settings.control))


def figures(secured: Secured) -> dict[str, int]:
    """What the controller counted, as its friend is told."""
    channel = channel_of(secured.config(secured.friend))
    channel.start()
    try:
        assert channel.wait_fresh(LONG) is not None, channel.trouble
        return channel.inspect(deadline=time.monotonic() + LONG)
    finally:
        channel.close()


def test_a_client_that_is_allowed_publishes_and_reads(secured: Secured) -> None:
    config = secured.config(secured.friend)
    with MMCache.connect(config, strict=True, connect_timeout=LONG) as writer:
        assert writer.put(key_of("secured"), torch.arange(8.0)).status == "stored"
        with MMCache.connect(config, strict=True, connect_timeout=LONG, local_entries=False) as reader:
            found = reader.get(key_of("secured"))
            assert found is not None
            assert torch.equal(found.tensor, torch.arange(8.0))


def test_without_keys_with_others_and_with_those_of_another_controller_it_is_refused_and_told_why(
    secured: Secured,
) -> None:
    cases = [
        (secured.config(None), "wants clients with keys", "no_key", "refused.handshake"),
        (secured.config(secured.stranger), f"add {secured.stranger.public} to its", "key_refused", "refused.key"),
        (
            secured.config(secured.friend, controller=secured.make_keys("other").public),
            "control.controller_key is not the controller's public key",
            "controller_key",
            "refused.handshake",
        ),
    ]
    for config, why, word, counted in cases:
        before = figures(secured).get(counted, 0)
        with MMCache.connect(config, connect_timeout=0.5, read_timeout=0.5) as cache:
            wait_for(why, lambda cache=cache: cache._channel.trouble)
            began = time.monotonic()
            assert cache.get(key_of("any")) is None
            assert cache.put(key_of("any"), torch.ones(8)).reason == "not_fresh"
            assert time.monotonic() - began < LONG
            stats = cache.stats()
            assert (stats["miss.not_fresh"], stats["session.fresh"]) == (1, 0)
            assert stats[f"control.hello_failed.{word}"] >= 1
            with pytest.raises(ControllerUnavailable, match=r"no fresh session with tcp://127.*: .*") as caught:
                cache._channel.inspect(deadline=time.monotonic() + LONG)
            assert why in str(caught.value)
        assert figures(secured)[counted] > before
    secured.wait_logged(f"its key {secured.stranger.public} is not in controller.client_keys_file")


def test_a_strict_client_raises_with_the_reason(secured: Secured) -> None:
    with pytest.raises(ControllerUnavailable, match="refused this client's key"):
        MMCache.connect(secured.config(secured.stranger), strict=True, connect_timeout=3.0)


def test_keys_for_a_controller_without_keys_and_nobody_at_all_are_told_apart(
    secured: Secured, serving: Serving
) -> None:
    for address, why in (
        (serving.controller.address, "has no keys, and this client has"),
        ("tcp://127.0.0.1:9", "nobody accepts a connection"),
    ):
        channel = channel_of(secured.config(secured.friend, address=address))
        channel.start()
        try:
            wait_for(why, lambda channel=channel: channel.trouble)
        finally:
            channel.close()


def test_a_client_that_is_added_is_taken_without_a_restart_of_anything(secured: Secured) -> None:
    added = secured.make_keys("added")
    channel = channel_of(secured.config(added))
    channel.start()
    try:
        wait_for("refused this client's key", lambda: channel.trouble)
        secured.allow(added)
        assert channel.wait_fresh(LONG) is not None, channel.trouble
    finally:
        channel.close()


def test_a_client_that_is_removed_loses_its_session_and_no_other_does(secured: Secured) -> None:
    leaving = secured.make_keys("leaving")
    secured.allow(leaving)
    removed, kept = (channel_of(secured.config(keys)) for keys in (leaving, secured.friend))
    for channel in (removed, kept):
        channel.start()
    try:
        assert all(channel.wait_fresh(LONG) for channel in (removed, kept))
        session = kept.fresh()
        assert session is not None
        secured.allow()
        wait_for("refused this client's key", lambda: removed.trouble)
        wait_until(lambda: removed.fresh() is None, timeout=LONG + SESSION_TTL, what="the end of its freshness")
        now = kept.fresh()
        assert now is not None
        assert now.session == session.session
    finally:
        removed.close()
        kept.close()


def test_a_broken_list_changes_nothing_and_is_counted(secured: Secured) -> None:
    try:
        for content, why in (("nonsense\n", "line 1: must begin with a key"), (None, "cannot be read")):
            secured.allowed.unlink()
            if content is not None:
                secured.allowed.write_text(content)
            # it is looked at when somebody comes
            wait_until(
                lambda why=why: bool(figures(secured)) and why in secured.log.read_text(), timeout=LONG, what=why
            )
        assert figures(secured)["client_keys_broken"] >= 2
    finally:
        secured.allow()


def test_the_reason_is_logged_at_a_bounded_rate(secured: Secured, caplog: pytest.LogCaptureFixture) -> None:
    keys = secured.make_keys("never allowed")
    channel = channel_of(secured.config(keys))
    with caplog.at_level(logging.WARNING, "mmcache.control"):
        channel.start()
        try:
            secured.wait_logged(keys.public, times=3)
        finally:
            channel.close()
    [told] = [record.getMessage() for record in caplog.records]
    assert "add " in told
    assert keys.public in told


def test_a_bad_key_file_is_bad_input_whatever_the_client_forgives(secured: Secured) -> None:
    keys = secured.make_keys("bad")
    config = secured.config(keys)
    keys.file.chmod(0o644)
    with pytest.raises(ConfigError, match=r"control\.secret_key_file: .*chmod 600"):
        MMCache.connect(config)
    keys.file.unlink()
    with pytest.raises(MMCacheError, match="No such file"):
        MMCache.connect(config)
