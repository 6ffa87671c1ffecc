"""What export, import and warm say: how far they are, what went wrong with which entry, and what became of all."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Final

import msgspec
import typer
from rich.console import Console

from mmcache.cli.admin.text import printable
from mmcache.cli.defaults import tell_of_defaults
from mmcache.cli.doctor.machine import size
from mmcache.cli.errors import InputError
from mmcache.cli.plurals import counted
from mmcache.errors import ConfigError, ControllerUnavailable, MMCacheError, StoreUnavailable

MOST_NOTES: Final = 20
"""Of what went wrong with single entries, so many are told; the rest is counted."""

PUBLISHED: Final[tuple[str, Mapping[str, str]]] = (
    "published",
    {"there_already": "were there already", "invalidated": "were invalidated since, and stay so"},
)
"""What becomes of entries that are published, as `Progress` takes it."""


class Progress:
    """Counts what becomes of entries and tells it on stderr; a context manager. Safe to use from several threads.

    Args:
        did: what is done with an entry: `exported`, `published`.
        words: for people, of the other counts that are possible.
    """

    def __init__(self, did: str, words: Mapping[str, str]) -> None:
        self._console = Console(stderr=True)
        self._status = self._console.status("")
        self._did = did
        self._words = words
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._notes = 0
        self._nbytes = 0
        self._total = 0
        self._before = 0
        self._began = 0.0
        self.complete = False
        """Whether all was looked at; set by whoever knows."""

    def __enter__(self) -> Progress:
        self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._status.stop()

    def say(self, text: str) -> None:
        """What is being done now."""
        self._status.update(printable(text))

    def begin(self, total: int) -> None:
        """From now on so many entries are carried over; what was counted before is not of these."""
        with self._lock:
            self._before = self._counts.total() + self._failures.total()
        self._total, self._began = total, time.monotonic()
        self.tick()

    def tick(self) -> None:
        """Show how far it is."""
        with self._lock:
            looked_at, nbytes = self._counts.total() + self._failures.total() - self._before, self._nbytes
        rate = nbytes / max(time.monotonic() - self._began, 1e-3)
        self.say(f"{looked_at:,} of {counted(self._total, 'entry', 'entries')}, {size(nbytes)}, {size(rate)}/s")

    def done(self, nbytes: int) -> None:
        """One was carried over."""
        with self._lock:
            self._counts[self._did] += 1
            self._nbytes += nbytes

    def count(self, word: str, number: int = 1) -> None:
        """Some were not, and need not be."""
        with self._lock:
            self._counts[word] += number

    def failed(self, reason: str, text: str) -> None:
        """One was not, and should have been."""
        with self._lock:
            self._failures[reason] += 1
            self._notes += 1
            notes = self._notes
        if notes <= MOST_NOTES:
            self._print(text)
        elif notes == MOST_NOTES + 1:
            self._print("More failed than are told one by one; they are counted.")

    def note(self, text: str) -> None:
        """Something that people should know."""
        self._print(text)

    @property
    def any_failed(self) -> bool:
        """Whether one did."""
        return bool(self._failures)

    def tell(self, place: str, *, as_json: bool) -> None:
        """Print the summary on stdout; `place` is where from or to."""
        if as_json:
            counts = {word: self._counts[word] for word in (self._did, *self._words)}
            told = {"complete": self.complete, **counts, "bytes": self._nbytes, "failed": dict(self._failures)}
            typer.echo(msgspec.json.encode(told))
            return
        done = counted(self._counts[self._did], "entry", "entries")
        parts = [f"{self._did} {done}, {size(self._nbytes)}, {place}"]
        parts += [f"{self._counts[word]:,} {text}" for word, text in self._words.items() if self._counts[word]]
        parts += [f"{number:,} failed ({reason})" for reason, number in sorted(self._failures.items())]
        typer.echo("; ".join(parts))
        if not self.complete:
            typer.echo("That is not all. Run it again: it goes on where it ended.")

    def _print(self, text: str) -> None:
        self._console.print(printable(text), markup=False, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def summary(progress: Progress, place: str, *, config: Path | None, as_json: bool) -> Iterator[None]:
    """Print what became of all, also where the block ends early; then the command ends with 1 if anything failed.

    But not where an option or a setting was wrong: then nothing was done. `config` is the value of --config.
    """
    try:
        with progress:
            yield
    except (ConfigError, InputError):
        raise
    except (MMCacheError, SystemExit) as error:
        progress.tell(place, as_json=as_json)
        if isinstance(error, (ControllerUnavailable, StoreUnavailable)):
            tell_of_defaults(config, store=True)
        raise
    progress.tell(place, as_json=as_json)
    if progress.any_failed:
        raise typer.Exit(1)
