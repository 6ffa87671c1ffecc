"""Says on stderr what the demo is doing: a moving bar on a terminal, a line a stage elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class Stages:
    """One stage after another, each with a count of steps."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def note(self, text: str) -> None:
        """A remark between stages."""
        self._console.print(text, markup=False, highlight=False)

    @contextlib.contextmanager
    def stage(self, text: str, steps: int = 1) -> Iterator[Callable[[], None]]:
        """Shows `text` while the block runs; what it yields is called after each step."""
        if not self._console.is_terminal:
            self.note(f"{text} …")
            yield lambda: None
            return
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, TimeElapsedColumn(), console=self._console) as progress:
            task = progress.add_task(text, total=steps)
            yield lambda: progress.advance(task)
