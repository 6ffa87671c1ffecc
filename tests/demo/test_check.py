"""The check: each way to be wrong is named, and nothing else is."""

from pathlib import Path

import msgspec
import pytest

from mmcache.cli.demo.check import find_problems
from mmcache.cli.demo.photographs import Photograph
from mmcache.cli.demo.protocol import Failed, Missed, Served
from mmcache.cli.demo.traffic import Request
from mmcache.key import EmbeddingKey

CAT, DOG = Photograph(Path("cat.png"), "cat"), Photograph(Path("dog.png"), "dog")
REQUESTS = [Request(photograph, "encoder-0", "prefill-0") for photograph in (CAT, DOG, CAT)]


def served(number: int, source: str, *, encode_ms: float | None = None) -> Served:
    mm_hash = REQUESTS[number].photograph.mm_hash
    key = EmbeddingKey("model", "1", mm_hash)
    return Served(number, key, source, elapsed_ms=2.0, encode_ms=encode_ms, nbytes=100, digest=f"bits of {mm_hash}")


ENCODED = [served(0, "computed", encode_ms=400.0), served(1, "computed", encode_ms=300.0), served(2, "store")]
READ = [served(0, "store"), served(1, "store"), served(2, "local")]
REFERENCE = {"cat": served(0, "computed"), "dog": served(1, "computed")}


def replaced(answers: list[Served], position: int, **changes: object) -> list[Served]:
    changed = list(answers)
    changed[position] = msgspec.structs.replace(changed[position], **changes)
    return changed


def test_a_right_run_has_no_problems() -> None:
    assert find_problems(REQUESTS, ENCODED, READ, [], REFERENCE) == []


@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_difference_in_any_read_is_named(position: int) -> None:
    (problem,) = find_problems(REQUESTS, ENCODED, replaced(READ, position, digest="other bits"), [], REFERENCE)
    name = REQUESTS[position].photograph.path.name
    assert problem.startswith(f"request {position} ({name}): what a prefill process got")
    assert "differs" in problem


def test_a_difference_in_what_an_encoder_got_is_named() -> None:
    (problem,) = find_problems(REQUESTS, replaced(ENCODED, 2, digest="other bits"), READ, [], REFERENCE)
    assert "what an encoder got (store) differs" in problem


def test_a_read_of_another_photographs_embedding_is_named() -> None:
    wrong = replaced(READ, 0, key=READ[1].key, digest=READ[1].digest)
    (problem,) = find_problems(REQUESTS, ENCODED, wrong, [], REFERENCE)
    assert "another key" in problem


def test_a_photograph_encoded_twice_is_named() -> None:
    assert find_problems(REQUESTS, replaced(ENCODED, 2, encode_ms=1.0), READ, [], REFERENCE) == [
        "cat.png was encoded 2 times"
    ]


def test_a_photograph_that_nobody_encoded_is_named() -> None:
    (problem,) = find_problems(REQUESTS, replaced(ENCODED, 1, encode_ms=None), READ, [], REFERENCE)
    assert problem.startswith("dog.png was served, but")


def test_requests_that_were_not_served_are_named() -> None:
    unserved = [Missed(0, READ[0].key), Failed(1, "ValueError: no")]
    assert find_problems(REQUESTS, ENCODED, [], unserved, REFERENCE) == [
        "request 0 (cat.png): its prefill process read nothing",
        "request 1 (dog.png): ValueError: no",
    ]
