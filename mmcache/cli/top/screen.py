"""A report for people: lines of text that fit a terminal, without anything that would have to be undone at the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from rich.cells import cell_len, set_cell_size

from mmcache.cli.admin.layout import Item, lines
from mmcache.cli.admin.text import printable, when
from mmcache.cli.doctor.machine import size
from mmcache.cli.plurals import counted
from mmcache.cli.top.looks import Account, NamedAccount
from mmcache.cli.top.report import HitRatios, Report, percent, ratio

MOST_ROWS: Final = 10
"""Tenants, and models, that are shown; those with the most bytes."""
_OTHER_LINES: Final = 22
"""All but the rows of tenants and models, at most."""
_LONGEST_NAME: Final = 32
_HOME, _TO_END_OF_LINE, _TO_END = "\x1b[H", "\x1b[K", "\x1b[J"


def told(report: Report, url: str, width: int, *, most_rows: int = MOST_ROWS) -> list[str]:
    """The lines, none wider than `width` columns, with up to `most_rows` tenants and as many models."""
    told = _lines(report, url, most_rows)
    return [set_cell_size(line, width).rstrip() if cell_len(line) > width else line for line in told]


def rows_in(height: int) -> int:
    """How many tenants, and models, there is room for on a terminal of so many lines."""
    return max(1, min(MOST_ROWS, (height - _OTHER_LINES) // 2))


def redrawn(shown: Sequence[str], height: int) -> str:
    """What draws these lines in the place of those that were there; as many as there is room for."""
    return _HOME + "".join(f"{line}{_TO_END_OF_LINE}\n" for line in shown[: max(1, height - 1)]) + _TO_END


def _lines(report: Report, url: str, most_rows: int) -> Iterator[str]:
    yield f"{printable(url)}  {when(report.at)}{_restarts(report.restarts)}"
    if report.trouble:
        yield f"What follows is old: {printable(report.trouble)}"
    load = report.load
    under_way = (
        counted(load.sessions, "session"),
        counted(load.claims, "claim"),
        counted(load.waiters, "wait"),
        counted(load.removals, "removal") + " to do",
    )
    yield ", ".join(under_way)
    if store := ", ".join(_store(report)):
        yield f"store: {store}"
    yield ""
    last = "last" if report.interval_s is None else f"last {report.interval_s:.1f} s"
    rows = [Item((last, *_cells(report.hit_ratios))), Item(("since start", *_cells(report.hit_ratios_since_start)))]
    yield from lines(("hit ratio", "entries", "bytes", "encode time"), rows, 0)
    yield ""
    states = [
        Item((state, f"{held.entries:,}", size(held.nbytes), "", "", "")) for state, held in report.states.items()
    ]
    head = ("", "entries", "bytes", "hits", "bytes hit", "time hit")
    yield from lines(head, [_row("all", report.total), *states], 0)
    yield f"evicted since start ({last}): {_reasons(report.evicted_since_start, report.evicted)}"
    for kind, accounts in (("tenant", report.tenants), ("model", report.models)):
        yield ""
        yield from lines((kind, *head[1:]), [_row(account.name, account) for account in accounts[:most_rows]], 0)
        if len(accounts) > most_rows:
            yield f"and {len(accounts) - most_rows:,} more"


def _store(report: Report) -> Iterator[str]:
    """Its room, where that is known, and what it lost, if anything, of that lately in brackets."""
    if report.store.capacity_bytes is not None and report.store.used_bytes is not None:
        capacity, used = report.store.capacity_bytes, report.store.used_bytes
        yield f"{size(used)} of {size(capacity)}"
        yield percent(used / max(1, capacity))
    if report.lost_since_start:
        lately = "-" if report.lost is None else f"{report.lost:,}"
        yield f"{counted(report.lost_since_start, 'entry', 'entries')} lost ({lately})"


def _restarts(number: int) -> str:
    return f"  {counted(number, 'restart')} of the controller" if number else ""


def _row(name: str, account: Account | NamedAccount) -> Item:
    short = name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"
    nbytes = ratio(account.hit_bytes, account.published_bytes)
    encode_time = ratio(account.saved_ms, account.published_ms)
    return Item(
        (
            short,
            f"{account.entries:,}",
            size(account.nbytes),
            f"{account.hits:,}",
            percent(nbytes),
            percent(encode_time),
        )
    )


def _cells(ratios: HitRatios | None) -> tuple[str, ...]:
    if ratios is None:
        return ("-", "-", "-")
    return percent(ratios.entries), percent(ratios.nbytes), percent(ratios.encode_time)


def _reasons(since_start: Mapping[str, int], lately: Mapping[str, int] | None) -> str:
    """`quota 1,205 (3)`: how many in all, and of these lately."""
    told = (
        f"{printable(reason)} {count:,} ({'-' if lately is None else format(lately.get(reason, 0), ',')})"
        for reason, count in since_start.items()
    )
    return ", ".join(told) or "nothing"
