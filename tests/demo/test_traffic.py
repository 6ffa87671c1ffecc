"""Where requests go: each to an encoder and then to a prefill process, few at a time, all to their end."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from mmcache.cli.demo.photographs import Photograph
from mmcache.cli.demo.protocol import Encode, Failed, Missed, Read, Served
from mmcache.cli.demo.traffic import Request, Router, make_requests
from mmcache.key import EmbeddingKey

PHOTOGRAPHS = [Photograph(Path(f"{letter}.png"), letter) for letter in "abcdef"]
ENCODERS = ["encoder-0", "encoder-1"]
PREFILLS = ["prefill-0", "prefill-1"]


def requests(count: int) -> list[Request]:
    return make_requests(PHOTOGRAPHS, count, encoders=ENCODERS, prefills=PREFILLS)


def served(number: int, mm_hash: str) -> Served:
    key = EmbeddingKey("model", "1", mm_hash)
    return Served(number, key, "store", elapsed_ms=1.0, encode_ms=None, nbytes=8, digest="d")


def test_every_photograph_is_asked_for_and_the_order_is_always_the_same() -> None:
    assert {request.photograph for request in requests(20)} == set(PHOTOGRAPHS)
    assert len(requests(20)) == 20
    assert requests(20) == requests(20)
    assert {request.encoder for request in requests(20)} == set(ENCODERS)
    assert {request.prefill for request in requests(20)} == set(PREFILLS)


def test_fewer_requests_than_photographs_take_the_first_ones() -> None:
    assert {request.photograph.mm_hash for request in requests(3)} == {"a", "b", "c"}
    assert len(requests(3)) == 3


def test_an_encoders_answer_goes_on_to_the_prefill_process_with_its_key() -> None:
    router = Router([Request(PHOTOGRAPHS[0], "encoder-0", "prefill-1")], concurrency=4)
    assert router.to_send() == [("encoder-0", Encode(0, "a.png", "a"))]
    assert router.to_send() == []
    router.answered("encoder-0", served(0, "a"))
    assert router.open == 1
    assert router.to_send() == [("prefill-1", Read(0, EmbeddingKey("model", "1", "a")))]
    router.answered("prefill-1", served(0, "a"))
    assert router.open == 0
    assert len(router.encoded) == len(router.read) == 1


def test_a_request_that_failed_or_missed_is_over() -> None:
    router = Router([Request(PHOTOGRAPHS[0], "encoder-0", "prefill-0")] * 2, concurrency=4)
    router.to_send()
    router.answered("encoder-0", Failed(0, "no"))
    router.answered("encoder-0", served(1, "a"))
    router.to_send()
    router.answered("prefill-0", Missed(1, EmbeddingKey("model", "1", "a")))
    assert router.open == 0
    assert [answer.request for answer in router.unserved] == [0, 1]


@given(st.integers(1, 40), st.integers(1, 5), st.randoms(use_true_random=False))
def test_whatever_the_order_of_answers_all_end_and_none_has_too_many_in_hand(count, concurrency, chance) -> None:
    router = Router(requests(count), concurrency=concurrency)
    in_hand: list[tuple[str, Encode | Read]] = []
    while router.open:
        in_hand += router.to_send()
        for worker in ENCODERS + PREFILLS:
            assert sum(name == worker for name, _ in in_hand) <= concurrency
        worker, command = in_hand.pop(chance.randrange(len(in_hand)))
        router.answered(worker, served(command.request, "a"))
    assert not in_hand
    assert sorted(s.request for s in router.encoded) == sorted(s.request for s in router.read) == list(range(count))
