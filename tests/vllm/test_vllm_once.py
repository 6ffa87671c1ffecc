"""Nobody encodes what another engine has encoded, or is encoding now."""

from __future__ import annotations

import contextlib

import pytest
from vllm_caches import Pictures, expect, figure, options, wait_for_figure
from vllm_engines import LocalEngine, Options, Request, Sound, started

from benchmarks.parts import Parts
from benchmarks.vllm_probe import holding

pictures = Pictures(1000)


def test_two_producers_with_the_same_new_picture_at_once_encode_it_once(
    both: list[LocalEngine], plain: LocalEngine
) -> None:
    for _ in range(5):
        request = Request([pictures(), "at once"])
        [right] = plain.generate(request)
        before = [engine.encoded() for engine in both]
        numbers = [engine.add(request) for engine in both]
        answers = [engine.answer(number) for engine, number in zip(both, numbers, strict=True)]
        assert [answer.tokens for answer in answers] == [right.tokens] * 2
        assert sum(engine.encoded() for engine in both) == sum(before) + 1


def test_who_waits_for_another_encoder_is_served_by_it_while_text_goes_on(
    both: list[LocalEngine], plain: LocalEngine
) -> None:
    slow, quick = both
    request, text = Request([pictures(), "wait for it"]), Request(["no picture"])
    [right], [right_text] = plain.generate(request), plain.generate(text)
    encoded, waits, granted = quick.encoded(), figure(quick, "waits"), figure(slow, "granted")
    with holding(slow) as wait_until_it_encodes:
        first = slow.add(request)
        wait_until_it_encodes()
        second = quick.add(request)
        wait_for_figure(quick, "waits", waits + 1)
        assert quick.generate(text)[0].tokens == right_text.tokens
        assert not quick.is_answered(second)
    assert slow.answer(first).tokens == quick.answer(second).tokens == right.tokens
    assert quick.encoded() == encoded
    assert figure(slow, "granted") == granted + 1


def test_a_waiting_request_that_is_aborted_leaves_nothing_behind(both: list[LocalEngine], plain: LocalEngine) -> None:
    slow, quick = both
    request = Request([pictures(), "never mind"])
    waits = figure(quick, "waits")
    with holding(slow) as wait_until_it_encodes:
        first = slow.add(request)
        wait_until_it_encodes()
        second = quick.add(request)
        wait_for_figure(quick, "waits", waits + 1)
        quick.abort(second)
        expect(quick, plain, Request(["next"]), Request([pictures(), "next"]))
    assert not slow.answer(first).error
    expect(quick, plain, request)


def test_an_encoder_that_dies_at_work_is_replaced_by_who_waits(
    model, cluster: Parts, both: list[LocalEngine], plain: LocalEngine, stack: contextlib.ExitStack
) -> None:
    doomed = LocalEngine(options(model("vision"), cluster.config, "ec_both"), name="doomed")
    stack.enter_context(started(doomed))
    request = Request([pictures(), "who else?"])
    waits, encoded = figure(both[0], "waits"), both[0].encoded()
    with holding(doomed) as wait_until_it_encodes:
        doomed.add(request)
        wait_until_it_encodes()
        number = both[0].add(request)
        wait_for_figure(both[0], "waits", waits + 1)
        doomed.end()
    assert both[0].answer(number).tokens == plain.generate(request)[0].tokens
    assert both[0].encoded() == encoded + 1


def test_an_engine_that_is_started_again_loads_what_it_encoded_before(
    model, cluster: Parts, plain: LocalEngine, stack: contextlib.ExitStack
) -> None:
    made = options(model("vision"), cluster.config, "ec_both")
    requests = [Request([pictures(), pictures(width=112), "before"]) for _ in range(3)]
    first = LocalEngine(made, name="before")
    with started(first):
        expect(first, plain, *requests)
        assert first.encoded() == 6
        wait_for_figure_with_steps(first, "published", 6)
    again = LocalEngine(made, name="after")
    stack.enter_context(started(again))
    expect(again, plain, *requests)
    assert again.encoded() == 0
    assert figure(again, "hits") == 6


@pytest.mark.parametrize(
    ("published", "wanted"), [("mine", "mine"), ("mine", "theirs"), ("mine", None), (None, "mine")]
)
def test_requests_of_one_salt_share_and_others_do_not(
    both: list[LocalEngine], plain: LocalEngine, published: str | None, wanted: str | None
) -> None:
    first, second = both
    picture = pictures()
    expect(first, plain, Request([picture, "whose?"], cache_salt=published))
    encoded = second.encoded()
    expect(second, plain, Request([picture, "whose?"], cache_salt=wanted))
    assert second.encoded() == encoded + (published != wanted)


def test_tenants_share_nothing(
    model, cluster: Parts, both: list[LocalEngine], plain: LocalEngine, stack: contextlib.ExitStack
) -> None:
    stranger = LocalEngine(
        options(model("vision"), cluster.config, "ec_both", extra={"tenant": "other"}), name="tenant"
    )
    stack.enter_context(started(stranger))
    request = Request([pictures(), "whose?"])
    expect(both[0], plain, request)
    expect(stranger, plain, request)
    assert stranger.encoded() == 1


def test_sounds_are_shared_like_pictures(model, cluster: Parts, stack: contextlib.ExitStack) -> None:
    audio, arguments = model("audio"), {"dtype": "float32", "limit_mm_per_prompt": {"audio": 3}}
    alone = LocalEngine(Options(audio, arguments=arguments), name="plain")
    producer, consumer = (
        LocalEngine(options(audio, cluster.config, role, **arguments), name=role) for role in ("ec_both", "ec_consumer")
    )
    stack.enter_context(started(alone, producer, consumer))
    requests = [
        Request([Sound(1), "what is it?"]),
        Request([Sound(1), Sound(2, 0.5), "and now?"]),
        Request([Sound(2, 0.5), Sound(2, 0.5), "again?"]),
    ]
    expect(producer, alone, *requests)
    expect(consumer, alone, *requests)
    assert (producer.encoded(), consumer.encoded()) == (2, 0)


def wait_for_figure_with_steps(engine: LocalEngine, name: str, least: float) -> None:
    """Figures come with steps, which an idle engine has none of."""
    while figure(engine, name) < least:
        engine.chat("a step")
