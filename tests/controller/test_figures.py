"""What a controller tells of itself to those who ask."""

from __future__ import annotations

from controller_driver import TERM, World

from mmcache.control.messages import MAX_FIGURES, Figures, HelloAgain, Inspect


def test_the_figures_are_the_sizes_of_the_tables_first_and_then_the_counts() -> None:
    world = World()
    client = world.client("c")
    client.put("a", "b")
    client.claim("c")
    answer = client.ask(Inspect(TERM, client.session, 9))
    assert isinstance(answer, Figures)
    assert (answer.term, answer.session, answer.request) == (TERM, client.session, 9)
    assert list(answer.figures)[:5] == ["sessions", "entries", "claims", "waiters", "holds"]
    assert answer.figures == world.core.stats()
    assert (answer.figures["entries"], answer.figures["claims"], answer.figures["commit.stored"]) == (2, 1, 2)


def test_asking_for_figures_changes_none_of_them() -> None:
    world = World()
    client = world.client("c")
    assert client.ask(Inspect(TERM, client.session, 1)).figures == client.ask(Inspect(TERM, client.session, 2)).figures


def test_who_has_no_session_is_told_to_say_hello_and_no_figures() -> None:
    world = World()
    client = world.client("c")
    assert isinstance(client.ask(Inspect(TERM, client.session + 1, 1)), HelloAgain)


def test_more_names_than_an_answer_holds_are_left_out_and_never_the_tables() -> None:
    world = World()
    client = world.client("c")
    for number in range(2 * MAX_FIGURES):
        world.core.count(f"word-{number}")
    answer = client.ask(Inspect(TERM, client.session, 1))  # decoded again on the way, so within its bound
    assert len(answer.figures) == MAX_FIGURES
    assert {"sessions", "entries", "claims", "waiters", "holds"} <= answer.figures.keys()
