"""The policy study's traces are what they are said to be, and a file is refused with the line that is wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.policy import bars, study
from benchmarks.policy_replay import replay
from benchmarks.policy_traces import KINDS, Kind, read_csv, synthetic
from mmcache.controller.eviction import POLICIES


@pytest.mark.parametrize("drifting", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_half_of_the_requests_are_for_items_seen_once(kind: Kind, drifting: bool) -> None:
    trace = synthetic(kind, drifting=drifting, seed=7, requests=20_000, ranks=500)
    once = trace.requests >= 500
    assert once.mean() == pytest.approx(0.5, abs=0.02)
    assert len(np.unique(trace.requests[once])) == once.sum()
    assert trace.nbytes[trace.requests].min() > 0
    assert 0 < trace.compulsory_ms < trace.asked_ms


def test_images_have_the_published_tokens() -> None:
    trace = synthetic("images", drifting=False, seed=1, requests=20_000, ranks=500)
    tokens = (trace.nbytes - 4096) / (3584 * 2)
    for quantile, published in ((0.5, 540), (0.9, 1224), (0.99, 1271)):
        assert np.quantile(tokens, quantile) == pytest.approx(published, rel=0.03)


def test_videos_are_dearer_by_the_byte() -> None:
    trace = synthetic("video", drifting=False, seed=1, requests=20_000, ranks=500)
    video = trace.nbytes > 1280 * 3584 * 2 + 4096
    assert 0.02 < video.mean() < 0.06, "of 5 %, some are of few tokens"
    density = trace.cost_ms / trace.nbytes
    assert np.median(density[video]) > 1.5 * np.median(density[~video])


def test_popularity_drifts() -> None:
    def most_asked(drifting: bool) -> tuple[set[int], set[int]]:
        requests = synthetic("images", drifting=drifting, seed=1, requests=50_000, ranks=1000).requests
        first, last = (part[part < 1000] for part in (requests[:10_000], requests[-10_000:]))
        return tuple(set(np.argsort(-np.bincount(part, minlength=1000))[:20].tolist()) for part in (first, last))  # type: ignore[return-value]

    first, last = most_asked(False)
    assert len(first & last) >= 14
    first, last = most_asked(True)
    assert len(first & last) <= 10


def test_a_trace_is_the_same_for_the_same_seed() -> None:
    one, other = (synthetic("all", drifting=True, seed=3, requests=2000, ranks=100) for _ in range(2))
    assert (one.requests == other.requests).all()
    assert (one.nbytes == other.nbytes).all()


def test_with_room_for_all_only_first_uses_miss() -> None:
    trace = synthetic("all", drifting=False, seed=3, requests=2000, ranks=100)
    for name in POLICIES:
        outcome = replay(trace, name, trace.footprint)
        assert outcome.lost_ms == 0
        assert outcome.miss_ratio == len(np.unique(trace.requests)) / len(trace.requests)


def test_a_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("name,bytes,cost_ms\na,100,1.5\nb,200,2\n\na,999,9\n")
    trace = read_csv(file)
    assert trace.requests.tolist() == [0, 1, 0]
    assert trace.nbytes.tolist() == [100, 200]
    assert trace.cost_ms.tolist() == [1.5, 2.0]
    assert (trace.footprint, trace.asked_ms, trace.compulsory_ms) == (300, 5.0, 3.5)
    rows = study(lambda: trace, (0.1,), 0, reference=False)
    assert [row["bar"] for row in bars(rows, {})] == ["s3cost: lost, to s3fifo's"]


@pytest.mark.parametrize(
    "line", ["a,100", "a,many,1", "a,0,1", "a,-5,1", "a,1,nan", "a,1,-1", "a,1,inf", f"a,{2**48},1", "a,1.5,1"]
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(f"b,1,1\n{line}\n")
    with pytest.raises(ValueError, match=r"trace\.csv:2: "):
        read_csv(file)


def test_a_file_without_requests_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("name,bytes,cost_ms\n")
    with pytest.raises(ValueError, match="there is no request in it"):
        read_csv(file)
