"""Quotas and ages: what their texts mean, and that what cannot be is refused with what is wrong."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from mmcache.capacity_rules import MOST_RULES, AgeRule, Ages, Quota, Quotas, age_of, quota_of
from mmcache.key import Scope
from mmcache.setting_kinds import BadValue

SCOPE = Scope("acme", "qwen", "v1", None, "video")
QUOTA_FORM = "must be such as 'tenant=acme 20GiB' or 'model=qwen 30%', not "
AGE_FORM = "must be such as 'any 7d' or 'tenant=acme,modality=video 1h', not "


@pytest.mark.parametrize(
    ("text", "quota"),
    [
        ("tenant=acme 20GiB", Quota("tenant", "acme", 20 << 30, None)),
        ("model=qwen 30%", Quota("model", "qwen", None, 0.3)),
        ("  model=a=b   1.5%", Quota("model", "a=b", None, 0.015)),
        ("tenant=acme 4096", Quota("tenant", "acme", 4096, None)),
        ("tenant=acme 100%", Quota("tenant", "acme", None, 1.0)),
    ],
)
def test_a_quota_is_a_tenants_or_a_models(text: str, quota: Quota) -> None:
    assert quota_of(text) == quota


def test_a_share_is_of_the_capacity_and_bytes_are_themselves() -> None:
    assert quota_of("tenant=acme 25%").of(1000) == 250
    assert quota_of("tenant=acme 25B").of(1000) == 25


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", QUOTA_FORM),
        ("5%", QUOTA_FORM),
        ("tenant=acme", QUOTA_FORM),
        ("lora=x 5%", QUOTA_FORM),
        ("tenant 5%", "tenant must not be empty"),
        ("tenant= 5%", "tenant must not be empty"),
        ("tenant=a b 5%", "tenant may hold"),
        ("tenant=\u00e9 5%", "tenant may hold"),
        (f"model={'m' * 1000} 5%", "model "),
        ("tenant=acme 0", "must be of more than 0 bytes"),
        ("tenant=acme 0GiB", "must be of more than 0 bytes"),
        ("tenant=acme -5", "must be bytes or a size"),
        ("tenant=acme -5GiB", "must be bytes or a size"),
        ("tenant=acme 5gib", "must be bytes or a size"),
        ("tenant=acme \u0665", "must be bytes or a size"),
        ("tenant=acme 0%", "must be more than 0% and at most 100%"),
        ("tenant=acme 0.0%", "must be more than 0% and at most 100%"),
        ("tenant=acme 100.1%", "must be more than 0% and at most 100%"),
        ("tenant=acme 999%", "must be more than 0% and at most 100%"),
        ("tenant=acme -5%", "must be "),
        ("tenant=acme nan%", "must be "),
    ],
)
def test_what_is_no_quota_is_refused(text: str, wrong: str) -> None:
    with pytest.raises(BadValue) as caught:
        quota_of(text)
    assert str(caught.value).startswith(wrong)
    assert "\n" not in str(caught.value)


@given(st.text(max_size=40))
def test_any_text_is_a_rule_or_is_refused_with_a_short_reason(text: str) -> None:
    for read in (quota_of, age_of):
        reason = ""
        try:
            read(text)
        except BadValue as error:
            reason = str(error)
        assert len(reason) < 300


@pytest.mark.parametrize(
    ("texts", "wrong"),
    [
        (["tenant=a 1%", "tenant=b 1%", "tenant=a 2GiB"], "has tenant=a 2 times"),
        (["tenant=a 60%", "tenant=b 50%"], "has tenants with 110% of the capacity together; at most 100% is there"),
        (["model=a 60.2%", "tenant=a 90%", "model=b 40.2%"], "has models with 100.4% of the capacity together"),
        (["tenant=a 1%", 7], "must be a list of texts, not one with 7"),
        (["tenant=a 1%", None], "must be a list of texts, not one with null"),
        ("tenant=a 1%", "must be a list, not 'tenant=a 1%'"),
        (None, "must be a list, not null"),
        ({"tenant=a": "1%"}, "must be a list, not a mapping"),
        ([f"tenant={number} 1B" for number in range(MOST_RULES + 1)], f"has {MOST_RULES + 1} of them"),
    ],
)
def test_quotas_that_cannot_be_together_are_refused(texts: object, wrong: str) -> None:
    with pytest.raises(BadValue) as caught:
        Quotas().check(texts)
    assert str(caught.value).startswith(wrong)


def test_tenants_and_models_may_have_all_of_it_each() -> None:
    texts = ["tenant=a 33.4%", "tenant=b 33.3%", "tenant=c 33.3%", "model=a 100%", "model=b 900TiB"]
    assert Quotas().check(texts) == tuple(texts)
    assert Quotas().check([]) == ()


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("any 7d", AgeRule({}, 7 * 86_400.0)),
        ("any 1.5d", AgeRule({}, 1.5 * 86_400.0)),
        ("any 1s", AgeRule({}, 1.0)),
        ("any 365d", AgeRule({}, 365 * 86_400.0)),
        ("tenant=acme, modality=video 1h", AgeRule({"tenant": "acme", "modality": "video"}, 3600.0)),
        ("version=v1,lora=ab 90min", AgeRule({"version": "v1", "lora": "ab"}, 5400.0)),
    ],
)
def test_an_age_is_of_all_or_of_scopes(text: str, rule: AgeRule) -> None:
    assert age_of(text) == rule


@pytest.mark.parametrize(
    ("text", "matches"),
    [
        ("any 1h", True),
        ("tenant=acme,modality=video 1h", True),
        ("tenant=acme,modality=image 1h", False),
        ("model=acme 1h", False),
        ("lora=ab 1h", False),
    ],
)
def test_an_age_matches_scopes_that_have_all_its_fields(text: str, matches: bool) -> None:
    assert age_of(text).matches(SCOPE) is matches


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", AGE_FORM),
        ("any", AGE_FORM),
        ("7d", AGE_FORM),
        ("tenant 7d", AGE_FORM),
        ("mm_hash=x 1h", AGE_FORM),
        ("any=x 1h", AGE_FORM),
        ("any,tenant=acme 1h", AGE_FORM),
        ("tenant=acme, 1h", AGE_FORM),
        ("tenant=a,tenant=b 1h", "has tenant twice"),
        ("tenant=,model=x 1h", "tenant must not be empty"),
        ("any 0s", "must be of 1 second to 365 days"),
        ("any 0d", "must be of 1 second to 365 days"),
        ("any 999ms", "must be of 1 second to 365 days"),
        ("any 366d", "must be of 1 second to 365 days"),
        (f"any {'9' * 400}d", "must be of 1 second to 365 days"),
        ("any 8761h", "must be of 1 second to 365 days"),
        ("any -1h", "must be a duration"),
        ("any -1d", "must be a duration"),
        ("any nand", "must be a duration"),
        ("any \u00b2d", "must be a duration"),
        ("any 60", "must be a duration"),
    ],
)
def test_what_is_no_age_is_refused(text: str, wrong: str) -> None:
    with pytest.raises(BadValue) as caught:
        age_of(text)
    assert str(caught.value).startswith(wrong)
    with pytest.raises(BadValue):
        Ages().check(["any 7d", text])


def test_ages_are_a_list_of_texts() -> None:
    assert Ages().check(["any 7d", "any 1h"]) == ("any 7d", "any 1h")
    for wrong in ("any 7d", [7], None, ["any 7d"] * (MOST_RULES + 1)):
        with pytest.raises(BadValue):
            Ages().check(wrong)
