"""Encoder and prefill instance as they are deployed: `vllm serve`, a primer to the one, its answer to the other."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import pytest
from vllm_caches import EXACT, Pictures, figure, options, wait_for_figure
from vllm_engines import Answer, Clip, Handed, Options, Picture, ServedEngine, started

from benchmarks.parts import Parts
from benchmarks.vllm_probe import holding

pictures = Pictures(3000)


class Served(NamedTuple):
    plain: ServedEngine
    encoder: ServedEngine
    prefill: ServedEngine

    def prime(self, *media: Picture | Clip) -> dict[str, Any]:
        """Have the encoder encode, one primer a medium; what the prefill instance is to be told."""
        params: dict[str, Any] = {}
        for medium in media:
            answer = self.encoder.chat(medium, max_tokens=1)
            assert not answer.error
            assert answer.ec_transfer_params
            params |= answer.ec_transfer_params
        return params


@pytest.fixture(scope="module")
def served(model, cluster: Parts) -> Iterator[Served]:
    vision = model("vision")
    served = Served(
        ServedEngine(Options(vision, arguments=EXACT), name="plain"),
        ServedEngine(options(vision, cluster.config, "ec_producer"), name="encoder"),
        ServedEngine(options(vision, cluster.config, "ec_consumer"), name="prefill"),
    )
    with started(*served):
        yield served


def good(answer: Answer, right: Answer) -> None:
    assert answer.error == right.error == ""
    assert answer.tokens == right.tokens


def test_what_the_encoder_was_primed_with_the_prefill_instance_loads(served: Served) -> None:
    for parts in (
        [pictures(), "what is it?"],
        [pictures(width=112), " and ", pictures(height=112)],
        [Clip(3000), "what happens?"],
        [Clip(3001), pictures(), "what happens?"],
    ):
        params = served.prime(*(part for part in parts if not isinstance(part, str)))
        encoded = served.prefill.encoded()
        good(served.prefill.chat(*parts, ec_transfer_params=params), served.plain.chat(*parts))
        assert served.prefill.encoded() == encoded


def test_a_second_primer_with_the_same_picture_encodes_nothing(served: Served) -> None:
    """Also when its own cache holds that no longer."""
    picture = pictures()
    first = served.prime(picture)
    while not first.keys().isdisjoint(served.encoder.rpc("probe_shapes")[0]):
        served.prime(pictures(width=448, height=448))
    encoded = served.encoder.encoded()
    assert served.prime(picture) == first
    assert served.encoder.encoded() == encoded


def test_a_picture_can_be_named_without_its_pixels(served: Served) -> None:
    """Identifier and grid, as the encoder told them, are all that the prefill instance needs."""
    shown = [pictures(), pictures(width=112)]
    params = served.prime(*shown)
    handed = [Handed(identifier, item["metadata"]) for identifier, item in params.items()]
    encoded = served.prefill.encoded()
    good(
        served.prefill.chat(*handed, "what is it?", ec_transfer_params=params),
        served.plain.chat(*shown, "what is it?"),
    )
    assert served.prefill.encoded() == encoded


def test_a_picture_that_nobody_has_fails_its_request_and_nothing_else(served: Served) -> None:
    picture = pictures()
    [(identifier, item)] = served.prime(picture).items()
    nowhere = Handed("f" * len(identifier), item["metadata"])
    params = {nowhere.identifier: item}
    answer = served.prefill.chat(nowhere, "what is it?", ec_transfer_params=params)
    assert answer.error.startswith("500")
    assert served.prefill.is_alive
    good(served.prefill.chat(picture, "what is it?"), served.plain.chat(picture, "what is it?"))


def test_a_client_that_goes_away_while_its_request_waits_leaves_nothing_behind(served: Served) -> None:
    picture = pictures()
    waits = figure(served.prefill, "waits")
    with contextlib.ExitStack() as gone, holding(served.encoder) as wait_until_it_encodes:
        primer = served.encoder.begin(picture, max_tokens=1)
        wait_until_it_encodes()
        waiting = gone.enter_context(served.prefill.begin(picture, "what is it?"))
        wait_for_figure(served.prefill, "waits", waits + 1)
        waiting.close()
        wait_until_idle(served.prefill)
        good(served.prefill.chat("no picture"), served.plain.chat("no picture"))
    assert not primer.answer().error
    good(served.prefill.chat(picture, "what is it?"), served.plain.chat(picture, "what is it?"))


def test_figures_are_on_the_metrics_page_and_in_the_log(served: Served) -> None:
    picture = pictures()
    hits, published = figure(served.prefill, "hits"), figure(served.encoder, "published")
    params = served.prime(picture)
    assert not served.prefill.chat(picture, "what is it?", ec_transfer_params=params).error
    wait_for_figure(served.prefill, "hits", hits + 1)
    served.prime(pictures())  # figures come with steps, which an idle engine has none of
    wait_for_figure(served.encoder, "published", published + 1)


def test_an_engine_of_both_roles_found_by_name_alone_ends_when_it_is_told_to(
    model, cluster: Parts, served: Served
) -> None:
    made = options(model("vision"), cluster.config, "ec_both")
    engine = ServedEngine(msgspec.structs.replace(made, by_name=True), name="both")
    picture = pictures()
    served.prime(picture)
    with started(engine):
        good(engine.chat(picture, "what is it?"), served.plain.chat(picture, "what is it?"))
        assert engine.encoded() == 0
        processes = engine.processes
        assert engine.agent in processes
        engine.end(gracefully=True)
        assert not [process for process in processes if process.is_running()]
    assert not re.findall(r'File "[^"]*/mmcache/(?:agent|client|control|integrations)/.*', engine.said), "vLLM may have"


def wait_until_idle(engine: ServedEngine) -> None:
    """Until it has no request any more."""
    deadline = time.monotonic() + 60.0
    while any(engine.metrics()[f"vllm:num_requests_{state}"] for state in ("running", "waiting")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
