"""An observation for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.markup import escape
from rich.table import Table

from mmcache.cli.doctor.machine import size
from mmcache.cli.stats.observer import Controller, Observation, Store
from mmcache.cli.top.report import percent, ratio


def tables(observation: Observation) -> Iterator[Table | str]:
    """One table for each end, and what is wrong with it."""
    yield _verdict(observation)
    yield from _controller(observation.controller)
    yield from _store(observation.store)


def _verdict(observation: Observation) -> str:
    if observation.serves:
        return "[green]A client could serve from here.[/green]"
    return "[red]A client could not serve from here: reads miss and puts drop.[/red]"


def _controller(controller: Controller) -> Iterator[Table | str]:
    state = f"session fresh, lineage {controller.lineage}" if controller.fresh else "no fresh session"
    yield f"controller {controller.address}: {state}"
    if controller.trouble:
        yield f"  [red]{escape(controller.trouble)}[/red]"
    if controller.figures:
        yield f"hit ratio since its start: {_hit_ratios(controller.figures)}"
        table = Table("figure", "value")
        table.columns[1].justify = "right"
        for name, value in controller.figures.items():
            table.add_row(escape(name), f"{value:,}")
        yield table


def _hit_ratios(figures: Mapping[str, int]) -> str:
    """Those that docs/operations.md defines, of what was counted since the controller's start."""
    ratios = {
        "entries": ratio(figures.get("hits", 0), figures.get("missed", 0)),
        "bytes": ratio(figures.get("hit_bytes", 0), figures.get("published_bytes", 0)),
        "encode time": ratio(figures.get("saved_ms", 0), figures.get("published_ms", 0)),
    }
    return ", ".join(f"{name} {percent(value)}" for name, value in ratios.items())


def _store(store: Store) -> Iterator[Table | str]:
    state = f"attached, {store.attachment}" if store.attached else "not attached"
    yield f"store {store.master}: {state}"
    if store.trouble:
        yield f"  [red]{escape(store.trouble)}[/red]"
    if store.metrics_trouble:
        yield f"  segments unknown: {escape(store.metrics_trouble)}"
    if store.capacity_bytes is None or store.used_bytes is None:
        return
    if not store.segments:
        yield "  [red]the master counts no memory, so every put drops as no_space[/red]"
        yield f"  [red]{escape(store.memory_trouble)}[/red]"
        return
    table = Table("segment", "size", "used", "used %")
    for column in table.columns[1:]:
        column.justify = "right"
    rows = [(segment.segment_name, segment.size_bytes, segment.allocator_used_bytes) for segment in store.segments]
    for name, nbytes, used in [*rows, ("all", store.capacity_bytes, store.used_bytes)]:
        table.add_row(escape(name), size(nbytes), size(used), f"{100 * used / max(1, nbytes):.1f}")
    yield table
