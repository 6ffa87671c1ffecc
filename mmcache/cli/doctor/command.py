"""`mmcache doctor` on the command line."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer
from rich.console import Console
from rich.markup import escape

from mmcache.cli.doctor.finding import Finding, Status, failing
from mmcache.cli.errors import InputError, reported
from mmcache.cli.signals import orderly_end
from mmcache.config import CONFIG_VARIABLE, Settings, load, without_settings
from mmcache.errors import ConfigError

_COLOURS: Final = {Status.OK: "green", Status.WARNING: "yellow", Status.FAILING: "red"}


class Report(msgspec.Struct):
    """What `--json` prints."""

    ok: bool
    """Whether nothing fails."""
    findings: dict[str, list[Finding]]
    """By what was looked at."""


def doctor(
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", metavar="FILE", help="A client's. Default: the file that MMCACHE_CONFIG names."),
    ] = None,
    wait: Annotated[
        float | None,
        typer.Option(
            min=1.0, max=86_400.0, metavar="SECONDS", help="Wait until the cluster serves; look at nothing else."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else on stdout.")] = False,
) -> None:
    """Find out why this machine, or its cluster, does not serve.

    Looks at the machine, at what is installed, and, where there is a configuration (--config, MMCACHE_CONFIG or
    settings in the environment), at the cluster: who listens, who answers, and whether an object goes into the store
    and back. Each line that is not in order says what to do. Nothing is changed, but for an object of 4 KiB in the
    store, which the store evicts.

    With --wait, for init containers and scripts: looks at the cluster alone, again and again, and ends as soon as it
    serves.

    Exits with 0 if nothing fails (warnings do not count), 1 if something does, 2 for a wrong option.
    """
    with reported("doctor"), orderly_end():
        console = Console(stderr=True)
        with console.status("looking") as status:
            sections = _waited(config, wait, status.update) if wait is not None else _looked(config, status.update)
        findings = [finding for section in sections.values() for finding in section]
        fine = not any(finding.status is Status.FAILING for finding in findings)
        if json:
            typer.echo(msgspec.json.encode(Report(fine, sections)))
        else:
            _print(sections)
            _print_verdict(findings, configured="cluster" in sections)
        if not fine:
            raise typer.Exit(1)


def _waited(config: Path | None, seconds: float, progress: Callable[[str], None]) -> dict[str, list[Finding]]:
    from mmcache.cli.doctor.examination import wait_for_cluster  # noqa: PLC0415 (`mmcache --help` needs none of it)

    if not _is_configured(config):
        raise InputError(f"--wait needs a configuration: give --config FILE or set {CONFIG_VARIABLE}")
    settings = load(config)
    progress(f"waiting up to {seconds:g} s for the cluster")
    findings, took_s = wait_for_cluster(settings, seconds, progress=lambda line: progress(escape(line)))
    silent = [f"{finding.name}: {finding.detail}" for finding in findings if finding.status is Status.FAILING]
    if silent:
        typer.echo(f"The cluster did not serve within {took_s:.1f} s. {'; '.join(silent)}.", err=True)
    return {"cluster": findings}


def _looked(config: Path | None, progress: Callable[[str], None]) -> dict[str, list[Finding]]:
    from mmcache.cli.doctor.examination import machine_checks, network_checks, software_checks  # noqa: PLC0415
    from mmcache.cli.doctor.finding import Check, examine  # noqa: PLC0415

    def examined(checks: Iterable[Check]) -> list[Finding]:
        findings = []
        for check in checks:
            progress(f"looking at {check.name}")
            findings.append(examine(check))
        return findings

    settings, wrong = Settings(), None
    if _is_configured(config):
        try:
            settings = load(config)
        except ConfigError as error:
            wrong = failing("configuration", str(error), "Correct it; the cluster was not looked at.")
    sections = {"machine": examined(machine_checks(settings)), "software": examined(software_checks())}
    if wrong is not None:
        sections["cluster"] = [wrong]
    elif _is_configured(config):
        progress("looking at the cluster")
        sections["cluster"] = list(network_checks(settings))
    return sections


def _is_configured(config: Path | None) -> bool:
    return config is not None or len(without_settings(os.environ)) < len(os.environ)


def _print(sections: dict[str, list[Finding]]) -> None:
    console = Console(soft_wrap=True, highlight=False)
    width = max(len(finding.name) for section in sections.values() for finding in section)
    for title, section in sections.items():
        console.print(f"[bold]{title}[/bold]")
        for finding in section:
            colour = _COLOURS[finding.status]
            status = f"[{colour}]{finding.status.value:<8}[/{colour}]"
            console.print(f"  {status} {finding.name:<{width}}  {escape(finding.detail)}")
            if finding.advice:
                console.print(f"  {'':<8} {'':<{width}}  → {escape(finding.advice)}")


def _print_verdict(findings: Sequence[Finding], *, configured: bool) -> None:
    counts = {status: sum(finding.status is status for finding in findings) for status in Status}
    verdict = ", ".join(f"{count} {status.value}" for status, count in counts.items() if count)
    if not configured:
        verdict += f". No configuration, so no cluster was looked at: give --config FILE or set {CONFIG_VARIABLE}"
    typer.echo(f"{verdict}.")
