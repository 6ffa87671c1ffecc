"""Beginnings of objects are read without a lease, and whatever a master says, nothing else is taken for them.

In a process of its own, as in use: Mooncake's transfer engine stays in a process for good.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster import wait_until
from raw_http import RawServer, response
from serving import Serving, key_of, name_of, plant, store_of

from mmcache.entry import PREFIX_BYTES
from mmcache.http_call import call
from mmcache.store.base import Outcome

LONG = 120.0
READ = """
import json, sys, time
from mmcache.config import StoreSettings
from mmcache.errors import MMCacheError
from mmcache.store.prefixes import PrefixReader

metrics, names = sys.argv[1], json.loads(sys.argv[2])
reader = PrefixReader(StoreSettings(metrics=metrics), timeout=20.0)
for _ in range(2):
    try:
        [read] = reader.read([names])
    except MMCacheError as error:
        print(json.dumps([type(error).__name__, str(error)]))
    else:
        print(json.dumps([one and [one.content.hex(), one.nbytes] for one in read]))
"""


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    with Serving(lease_ms=4000) as serving:
        yield serving


def read(metrics: str, names: list[Any], tmp_path: Path, script: str = READ) -> Any:
    """What it reads, the same twice."""
    ended = subprocess.run(
        [sys.executable, "-c", script, metrics, json.dumps(names)],
        capture_output=True,
        text=True,
        timeout=LONG,
        check=False,
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if not name.startswith(("MC_", "GLOG_"))},
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == "", "Mooncake's own log"
    first, second = map(json.loads, ended.stdout.splitlines())
    assert first == second
    return first


def test_the_first_bytes_of_each_and_its_size(serving: Serving, tmp_path: Path) -> None:
    cache = serving.connect()
    whole, short, longer = key_of("whole"), key_of("short"), key_of("longer")
    plant(cache, whole, bytes(range(256)) * (PREFIX_BYTES // 256))
    plant(cache, short, b"s" * (PREFIX_BYTES - 1))
    plant(cache, longer, b"l" * PREFIX_BYTES + b"x" * 1000)
    names = [name_of(cache, key) for key in (whole, short, key_of("nothing"), longer)]
    assert read(serving.store.metrics, names, tmp_path) == [
        [(bytes(range(256)) * (PREFIX_BYTES // 256)).hex(), PREFIX_BYTES],
        None,
        None,
        [(b"l" * PREFIX_BYTES).hex(), PREFIX_BYTES + 1000],
    ]


def test_what_was_just_read_is_not_leased(serving: Serving, tmp_path: Path) -> None:
    """What is leased cannot be removed: so it would be after each reading."""
    cache, key = serving.connect(), key_of("unleased")
    plant(cache, key, b"u" * PREFIX_BYTES)
    name = name_of(cache, key)

    def removed() -> bool:
        assert read(serving.store.metrics, [name], tmp_path) == [[(b"u" * PREFIX_BYTES).hex(), PREFIX_BYTES]]
        return store_of(cache).remove([name], deadline=time.monotonic() + LONG) == [Outcome.OK]

    wait_until(removed, timeout=LONG, what="the end of the writer's own lease")


def test_piece_after_piece_comes_in_order(serving: Serving, tmp_path: Path) -> None:
    """While later ones are on the way already, into memory that was used before."""
    cache = serving.connect()
    keys = [key_of(number, version="pieces") for number in range(10)]
    for number, key in enumerate(keys):
        plant(cache, key, bytes([number]) * PREFIX_BYTES)
    names = [name_of(cache, key) for key in keys]
    asked = [[names[number]] * 2 if number % 2 else [names[number], "nothing"] for number in range(10)]
    script = READ.replace(
        "[read] = reader.read([names])", "read = [one for piece in reader.read(names) for one in piece]"
    )
    expected = []
    for number in range(10):
        one = [(bytes([number]) * PREFIX_BYTES).hex(), PREFIX_BYTES]
        expected += [one, one] if number % 2 else [one, None]
    assert read(serving.store.metrics, asked, tmp_path, script=script) == expected


def test_as_many_at_once_as_there_may_be(serving: Serving, tmp_path: Path) -> None:
    cache = serving.connect()
    keys = [key_of(number, version="many") for number in range(256)]
    for start in range(0, 256, 64):
        outcomes = cache.put_many([(key, torch.zeros(8)) for key in keys[start : start + 64]])
        assert {outcome.status for outcome in outcomes} == {"stored"}
    names = [name_of(cache, key) for key in keys]
    found = read(serving.store.metrics, names, tmp_path)
    assert all(one is not None for one in found)
    assert len({content for content, _ in found}) == 256


def place(**fields: object) -> dict[str, object]:
    return {
        "size_": 8192,
        "buffer_address_": 1 << 40,
        "protocol_": "tcp",
        "transport_endpoint_": "127.0.0.1:1",
        **fields,
    }


@pytest.mark.parametrize(
    "found",
    [
        {"ok": False, "values": None},
        {"ok": True, "values": []},
        {"ok": True, "values": None},
        {"ok": True, "values": [place()]},  # where nobody listens
        {"ok": True, "values": [place(size_=PREFIX_BYTES - 1)]},
    ],
)
def test_what_lies_nowhere_is_none(found: object, tmp_path: Path) -> None:
    answer = response(200, json.dumps({"success": True, "data": {"name": found}}).encode())
    with RawServer(lambda *_: answer) as server:
        assert read(server.url.removeprefix("http://"), ["name"], tmp_path) == [None]


def test_what_lies_in_pieces_is_none(serving: Serving, tmp_path: Path) -> None:
    cache, key = serving.connect(), key_of("pieces")
    plant(cache, key, b"p" * PREFIX_BYTES)
    name = name_of(cache, key)
    found = call("GET", f"http://{serving.store.metrics}/batch_query_keys?keys={name}", timeout=LONG).body
    [where] = json.loads(found)["data"][name]["values"]
    for values, expected in (([where], [(b"p" * PREFIX_BYTES).hex(), PREFIX_BYTES]), ([where, where], None)):
        answer = response(200, json.dumps({"data": {name: {"ok": True, "values": values}}}).encode())
        with RawServer(lambda *_, answer=answer: answer) as server:
            assert read(server.url.removeprefix("http://"), [name], tmp_path) == [expected]


@pytest.mark.parametrize(
    "answer",
    [
        response(200, b"[]"),
        response(200, b"{"),
        response(200, b'{"data": {"name": {"ok": true, "values": [{"size_": "8192"}]}}}'),
        response(404, b"404 Not Found"),
        b"nonsense\r\n\r\n",
    ],
)
def test_a_master_that_makes_no_sense_is_told(answer: bytes, tmp_path: Path) -> None:
    with RawServer(lambda *_: answer) as server:
        kind, message = read(server.url.removeprefix("http://"), ["name"], tmp_path)
    assert kind == "StoreUnavailable"
    assert "/batch_query_keys" in message
