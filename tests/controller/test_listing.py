"""The store's list of names is read in pieces, strictly, and is whole or none."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from raw_http import Asked, RawServer, response

from mmcache.controller.reaper.listing import NotListed, listing, records
from mmcache.controller.reconciliation import MOST_RECORDS, RECORD
from mmcache.key import store_name_of

LINEAGE = "0a1b"
TIMEOUT_S = 20.0
NAMES = st.tuples(st.binary(min_size=64, max_size=64), st.integers(0, (1 << 63) - 1))
FOREIGN = st.one_of(
    st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"]), max_size=300),
    NAMES.map(lambda one: store_name_of(one[0], lineage="0a1c", generation=one[1])),
    NAMES.map(lambda one: store_name_of(one[0], lineage=LINEAGE, generation=one[1]) + "x"),
    NAMES.map(lambda one: "x" + store_name_of(one[0], lineage=LINEAGE, generation=one[1])),
    NAMES.map(lambda one: store_name_of(one[0], lineage=LINEAGE, generation=one[1]).upper()),
    NAMES.map(lambda one: store_name_of(one[0], lineage=LINEAGE, generation=(1 << 63) + one[1] % 1000)),
    st.just("mmc1." + "y" * 3000),
)


def line(name: tuple[bytes, int]) -> str:
    return store_name_of(name[0], lineage=LINEAGE, generation=name[1])


def unpacked(pieces: Iterator[bytes]) -> list[tuple[bytes, int]]:
    return [record for piece in pieces for record in RECORD.iter_unpack(piece)]


@example([(bytes(64), 0), (b"\xff" * 64, (1 << 63) - 1)], [], 1, False)
@given(st.lists(NAMES, max_size=20), st.lists(FOREIGN, max_size=5), st.integers(1, 400), st.booleans())
def test_all_of_a_lineage_is_found_however_the_text_is_cut(
    names: list[tuple[bytes, int]], foreign: list[str], size: int, ended: bool
) -> None:
    lines = [line(name) for name in names]
    for place, other in enumerate(foreign):
        lines.insert(place * 3, other)
    text = ("\n".join(lines) + ("\n" if ended else "")).encode()
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    assert unpacked(records(pieces, LINEAGE)) == names


def test_pieces_are_bounded() -> None:
    names = [(number.to_bytes(64, "big"), number) for number in range(2 * MOST_RECORDS + 1)]
    text = "".join(line(name) + "\n" for name in names).encode()
    pieces = list(records([text], LINEAGE))
    assert [len(piece) // RECORD.size for piece in pieces] == [MOST_RECORDS, MOST_RECORDS, 1]
    assert unpacked(iter(pieces)) == names


def answered(answer: bytes) -> list[tuple[bytes, int]]:
    """What is listed by a master that says this, and hangs up."""

    def say(asked: Asked, connection: socket.socket) -> None:
        assert (asked.method, asked.target) == ("GET", "/get_all_keys")
        connection.sendall(answer)
        connection.shutdown(socket.SHUT_RDWR)

    with RawServer(say) as server:
        return unpacked(listing(server.url.removeprefix("http://"), LINEAGE, timeout=TIMEOUT_S))


def test_a_whole_list_is_taken() -> None:
    name = (bytes(range(64)), 7)
    assert answered(response(200, line(name).encode() + b"\n")) == [name]
    assert answered(response(200)) == []


@pytest.mark.parametrize(
    ("answer", "word"),
    [
        (response(200, b"x" * 500)[:-1], "ended 1 bytes early"),
        (response(404, b"x"), "status 404"),
        (b"HTTP/1.1 200 OK\r\n\r\nmmc1", "no Content-Length"),
        (b"nonsense\r\n\r\n", "nonsense"),
        (b"", "/get_all_keys"),
    ],
)
def test_what_is_not_whole_is_none(answer: bytes, word: str) -> None:
    with pytest.raises(NotListed, match=word):
        answered(answer)


def test_a_master_that_is_not_there_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(NotListed, match="refused"):
        unpacked(listing(f"127.0.0.1:{port}", LINEAGE, timeout=TIMEOUT_S))
