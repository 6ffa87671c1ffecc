"""`mmcache demo` on the command line. Imports nothing heavy, so that `mmcache --help` stays quick."""

from __future__ import annotations

import contextlib
import importlib.util
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Annotated, Final, NoReturn

import typer

from mmcache.cli.errors import reported

_REQUIRED: Final = {"PIL": "Pillow", "skimage": "scikit-image", "transformers": "transformers"}


def demo(
    images: Annotated[
        Path | None,
        typer.Option(metavar="DIRECTORY", help="Your own images. Default: photographs that scikit-image ships."),
    ] = None,
    encoders: Annotated[int, typer.Option(min=1, max=32, metavar="N", help="Encoder processes.")] = 2,
    prefills: Annotated[int, typer.Option(min=1, max=32, metavar="N", help="Prefill processes.")] = 2,
    requests: Annotated[
        int | None,
        typer.Option(min=1, max=100_000, metavar="N", help="Requests in all. Default: eight for each image."),
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option(
            metavar="DIRECTORY",
            help="A local SigLIP or CLIP checkpoint. Default: SigLIP base with seeded random weights.",
        ),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")
    ] = False,
) -> None:
    """Encode photographs, read them elsewhere, and check every bit.

    Some processes encode, others read the embeddings. Starts a cluster of its own on this machine and stops it at the
    end.

    Exits with 0 if all is as it should be; 1 if any embedding differs from a direct encode, if any photograph was
    encoded twice, if a request was not served, or if it cannot run here; 2 for a wrong option.
    """
    missing = [name for module, name in _REQUIRED.items() if importlib.util.find_spec(module) is None]
    if missing:
        typer.echo(f"The demo needs {', '.join(missing)}: pip install 'mmcache[demo]'", err=True)
        raise typer.Exit(1)

    import msgspec  # noqa: PLC0415
    from rich.console import Console  # noqa: PLC0415

    from mmcache.cli.demo.progress import Stages  # noqa: PLC0415
    from mmcache.cli.demo.report import tables, verdict  # noqa: PLC0415
    from mmcache.cli.demo.run import DemoOptions, run_demo  # noqa: PLC0415

    options = DemoOptions(images=images, encoders=encoders, prefills=prefills, requests=requests, weights=weights)
    try:
        with reported("demo"), _orderly_end():
            report = run_demo(options, Stages(Console(stderr=True)))
    except KeyboardInterrupt:
        typer.echo("Interrupted; all that the demo started has ended.", err=True)
        raise typer.Exit(128 + signal.SIGINT) from None
    if json:
        typer.echo(msgspec.json.encode(report))
    else:
        console = Console()
        for table in tables(report):
            console.print(table)
        console.print(verdict(report), markup=False, highlight=False)
    if not report.ok:
        raise typer.Exit(1)


@contextlib.contextmanager
def _orderly_end() -> Iterator[None]:
    """Within the block, signals that end a process raise SystemExit, so that what was started is ended as well."""

    def end(number: int, _: FrameType | None) -> NoReturn:
        sys.exit(128 + number)

    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]  # as under nohup
    previous = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
