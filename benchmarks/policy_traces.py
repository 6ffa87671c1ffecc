"""Requests to replay: synthetic ones from published facts of multimodal serving, or those of a file."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Final, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

Kind = Literal["images", "video", "two models", "all"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)

TOKENS: Final = ((0.0, 64), (0.5, 540), (0.9, 1224), (0.99, 1271), (1.0, 1280))
"""Quantiles of an image's tokens. Those in the middle are published facts; both ends, and what is between, are ours."""
ZIPF: Final = 0.8
ONCE_SHARE: Final = 0.5
VIDEO_SHARE: Final = 0.05
VIDEO_TOKENS: Final = 20
"""To those of an image."""
WIDTHS: Final = (3584, 8192)
"""Of a 7B and a 72B model with one encoder: 2.3 times."""
ELEMENT_BYTES: Final = 2
PREFIX_BYTES: Final = 4096
DRIFTS: Final = 10
DRIFT_SHARE: Final = 0.2
"""Of the ranks, that are reshuffled at the beginning of each tenth but the first."""


class Trace(NamedTuple):
    """Requests for items, which are numbers."""

    title: str
    drifting: bool | None
    """None: nobody knows."""
    requests: npt.NDArray[np.int64]
    """One item each."""
    nbytes: npt.NDArray[np.int64]
    """Of each item, in the store."""
    cost_ms: npt.NDArray[np.float64]
    """To encode each item."""

    @property
    def footprint(self) -> int:
        """Bytes of all items that are asked for."""
        return int(self.nbytes[np.unique(self.requests)].sum())

    @property
    def asked_ms(self) -> float:
        """Encode time of all requests, were there no cache."""
        return float(self.cost_ms[self.requests].sum())

    @property
    def compulsory_ms(self) -> float:
        """Encode time of each item's first request, which no cache can save."""
        return float(self.cost_ms[np.unique(self.requests)].sum())


def synthetic(kind: Kind, *, drifting: bool, seed: int, requests: int, ranks: int) -> Trace:
    """Half of the requests are for items seen once, the others Zipf over so many ranks."""
    random = np.random.default_rng([seed, KINDS.index(kind), drifting])
    popularity = np.arange(1, ranks + 1) ** -ZIPF
    asked = random.choice(ranks, size=requests, p=popularity / popularity.sum())
    item_of_rank = random.permutation(ranks)
    for part in range(DRIFTS):
        if part and drifting:
            moved = random.choice(ranks, size=int(ranks * DRIFT_SHARE), replace=False)
            item_of_rank[moved] = item_of_rank[random.permutation(moved)]
        place = slice(part * requests // DRIFTS, (part + 1) * requests // DRIFTS)
        asked[place] = item_of_rank[asked[place]]
    once = np.flatnonzero(random.random(requests) < ONCE_SHARE)
    asked[once] = ranks + np.arange(len(once))
    items = ranks + len(once)
    shares, values = zip(*TOKENS, strict=True)
    tokens = np.interp(random.random(items), shares, values).round()
    if kind in {"video", "all"}:
        tokens[random.random(items) < VIDEO_SHARE] *= VIDEO_TOKENS
    width = np.full(items, WIDTHS[0])
    if kind in {"two models", "all"}:
        width = np.where(random.random(items) < 0.5, WIDTHS[0], WIDTHS[1])
    nbytes = (tokens * width * ELEMENT_BYTES + PREFIX_BYTES).astype(np.int64)
    title = f"{kind}, {'drifting' if drifting else 'stationary'}"
    return Trace(title, drifting, asked.astype(np.int64), nbytes, encode_ms(tokens))


def encode_ms(tokens: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """A fixed part, one that is linear in the tokens, and attention, which is quadratic and half of all at 8,192."""
    return 4.0 + 0.05 * tokens * (1.0 + tokens / 8192.0)


def read_csv(path: Path) -> Trace:
    """A file of lines `name,bytes,cost_ms`, one a request; a first line with these words is a header.

    An item's size and cost are those of its first request. Raises ValueError, which names the line, for anything else.
    """
    items: dict[str, int] = {}
    requests: list[int] = []
    nbytes: list[int] = []
    costs: list[float] = []
    with path.open(newline="", encoding="utf-8") as lines:
        for number, row in enumerate(csv.reader(lines), start=1):
            if not row or (number == 1 and row == ["name", "bytes", "cost_ms"]):
                continue
            try:
                name, size, cost = row[0], int(row[1]), float(row[2])
            except (IndexError, ValueError):
                raise ValueError(f"{path}:{number}: not name,bytes,cost_ms: {','.join(row)[:80]!r}") from None
            if not 0 < size < 2**48 or not 0.0 <= cost < math.inf:
                raise ValueError(
                    f"{path}:{number}: bytes must be positive, cost_ms a finite number that is not below 0"
                )
            item = items.setdefault(name, len(items))
            requests.append(item)
            if item == len(nbytes):
                nbytes.append(size)
                costs.append(cost)
    if not requests:
        raise ValueError(f"{path}: there is no request in it")
    return Trace(path.name, None, np.array(requests), np.array(nbytes), np.array(costs))
