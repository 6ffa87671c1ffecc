"""Claims that are held: renewed in time, never mistaken for another session's."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mmcache.control.calls import Acquisition
from mmcache.control.claims import HeldClaim, HeldClaims, Subject
from mmcache.key import Scope


def acquisition() -> Acquisition:
    return Acquisition(1, wait_s=1.0, renew_for_s=1.0, check=lambda: None, leave=lambda _: None)


OWNER = acquisition()
SUBJECT = Subject(Scope("default", "siglip", "v1", None, "image"), bytes(32), 0, "a1")


def hold(claims: HeldClaims, token: int, *, now: float, claim_s: float = 9.0, renew_for_s: float = 120.0) -> int:
    return claims.hold(token, OWNER, SUBJECT, claim_s=claim_s, renew_until=now + renew_for_s, now=now)


def test_a_number_is_never_used_again_though_the_next_term_repeats_the_token() -> None:
    claims = HeldClaims()
    old = hold(claims, 5, now=0.0)
    claims.session_lost()
    new = hold(claims, 5, now=1.0)
    assert old != new
    assert not claims.regain(old, 5, 0, claim_s=9.0, now=1.0)
    assert claims.end(old) == 0, "the number of an earlier session ended another's claim"
    assert 5 in claims
    assert claims.end(new) == 5
    assert claims.end(new) == 0


def test_a_claim_is_renewed_until_it_ends() -> None:
    claims = HeldClaims()
    number = hold(claims, 5, now=0.0)
    assert claims.next_deadline() == 3.0
    assert claims.due(2.9) == []
    assert claims.due(3.0) == [5]
    assert claims.due(3.1) == []
    assert claims.due(6.0) == [5]
    claims.end(number)
    assert claims.due(9.0) == []
    assert claims.next_deadline() is None


def test_a_claim_is_not_renewed_for_longer_than_its_caller_said_and_held_until_it_has_lapsed() -> None:
    claims = HeldClaims()
    number = hold(claims, 5, now=0.0, renew_for_s=5.0)
    hold(claims, 6, now=0.0)
    assert sorted(claims.due(3.0)) == [5, 6]
    assert claims.due(6.0) == [6]
    assert claims.due(12.0) == [6]
    assert 5 in claims, "its caller can still give it up for others to take at once"
    assert claims.due(15.0) == [6]
    assert 5 not in claims
    assert claims.end(number) == 0


def test_claims_that_are_lost_are_renewed_no_longer() -> None:
    claims = HeldClaims()
    hold(claims, 5, now=0.0)
    assert claims.lost([5, 6]) == 1
    assert claims.due(3.0) == []


def test_a_claim_that_is_granted_again_keeps_its_number() -> None:
    claims = HeldClaims()
    assert hold(claims, 5, now=0.0) == hold(claims, 5, now=1.0)
    assert len(claims) == 1


def test_what_is_computed_is_claimed_again_under_its_number() -> None:
    claims = HeldClaims()
    number = hold(claims, 5, now=0.0)
    assert [claim.token for claim in claims.session_lost()] == [5]
    assert claims.due(3.0) == [], "a claim was renewed that no session has granted"
    assert claims.to_claim_again("a1", 4.0) == {number: HeldClaim(0, OWNER, SUBJECT, 120.0, 129.0)}
    assert claims.regain(number, 1, 0, claim_s=6.0, now=4.0)
    assert 1 in claims
    assert claims.due(6.0) == [1]
    assert claims.end(number) == 1


def test_what_is_outdated_over_or_of_another_lineage_is_not_claimed_again() -> None:
    claims = HeldClaims()
    outdated, over = hold(claims, 5, now=0.0), hold(claims, 6, now=0.0, renew_for_s=3.0)
    claims.session_lost()
    assert list(claims.to_claim_again("a1", 4.0)) == [outdated]
    assert not claims.regain(outdated, 1, 7, claim_s=9.0, now=4.0)
    assert claims.end(outdated) == 0
    assert not claims.regain(outdated, 1, 0, claim_s=9.0, now=4.0), "it has ended meanwhile"
    assert len(claims) == 1
    assert claims.to_claim_again("a2", 4.0) == {}
    assert len(claims) == 0
    assert claims.end(over) == 0


def test_what_no_session_grants_again_is_forgotten_when_it_would_have_lapsed() -> None:
    claims = HeldClaims()
    hold(claims, 5, now=0.0, renew_for_s=5.0)
    claims.session_lost()
    while (due := claims.next_deadline()) is not None:
        assert due < 30.0
        assert claims.due(due) == []
    assert len(claims) == 0


@given(st.lists(st.tuples(st.floats(0.0, 3.0), st.sampled_from([1.0, 4.0, 10.0])), min_size=1, max_size=20))
def test_no_claim_waits_longer_than_a_third_of_its_time_for_a_renewal(arrivals: list[tuple[float, float]]) -> None:
    claims, now = HeldClaims(), 0.0
    confirmed: dict[int, tuple[float, float]] = {}

    def check_until(then: float) -> None:
        while (due := claims.next_deadline()) is not None and due <= then:
            for token in claims.due(due):
                last, claim_s = confirmed[token]
                assert due - last <= claim_s / 3 + 1e-6
                confirmed[token] = due, claim_s

    for token, (pause, claim_s) in enumerate(arrivals, start=1):
        check_until(now + pause)
        now += pause
        confirmed[token] = now, claim_s
        hold(claims, token, now=now, claim_s=claim_s)
    check_until(now + 5.0)
    assert all(last > 0.0 or now + 5.0 < claim_s / 3 for last, claim_s in confirmed.values())
