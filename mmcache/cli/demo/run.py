"""Runs the demo: a cluster of its own, the processes, the requests, the check."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from mmcache.cli.demo.check import find_problems
from mmcache.cli.demo.checkpoint import Checkpoint
from mmcache.cli.demo.cluster import DemoCluster
from mmcache.cli.demo.errors import DemoError
from mmcache.cli.demo.photographs import Photograph, find_photographs
from mmcache.cli.demo.progress import Stages
from mmcache.cli.demo.protocol import Answer, Encode, Failed, Finish, Finished, Missed, Ready, Served
from mmcache.cli.demo.report import Report, make_report
from mmcache.cli.demo.traffic import Router, make_requests
from mmcache.cli.demo.worker import CONCURRENCY
from mmcache.cli.demo.workers import Workers

REQUESTS_PER_PHOTOGRAPH: Final = 8
START_S: Final = 180.0
"""For all processes to load; importing torch and transformers takes seconds, and on a busy machine many."""
SILENCE_S: Final = 90.0
"""Longest time without an answer from anyone; above the 60 s that a worker gives one request."""
REFERENCE: Final = "reference"


class DemoOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What `mmcache demo` was asked for; None means the default."""

    images: Path | None = None
    encoders: int = 2
    prefills: int = 2
    requests: int | None = None
    weights: Path | None = None


def run_demo(options: DemoOptions, stages: Stages) -> Report:
    """Runs it all and checks it all; nothing that it started outlives it.

    Raises:
        InputError: a directory that the options name is of no use.
        DemoError: it cannot run, or one of its processes failed.
    """
    began = time.monotonic()
    # Absolute, since the processes run elsewhere.
    images = None if options.images is None else options.images.resolve()
    weights = None if options.weights is None else options.weights.resolve()
    if weights is not None:
        Checkpoint(weights)  # a wrong directory is refused here, not by each process
    with stages.stage("reading photographs"):
        photographs = _photographs(images, stages)
    encoders = [f"encoder-{number}" for number in range(options.encoders)]
    prefills = [f"prefill-{number}" for number in range(options.prefills)]
    count = options.requests or REQUESTS_PER_PHOTOGRAPH * len(photographs)
    requests = make_requests(photographs, count, encoders=encoders, prefills=prefills)
    unique = {request.photograph.mm_hash: request.photograph for request in requests}

    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mmcache-demo-")))
        with stages.stage("starting a cluster on this machine"):
            cluster = stack.enter_context(DemoCluster(directory))
        workers = stack.enter_context(Workers(directory, cluster.check))
        tower = [] if weights is None else ["--weights", str(weights)]
        for role, names in (("encoder", encoders), ("prefill", prefills), ("reference", [REFERENCE])):
            arguments = [] if role == "reference" else ["--client", str(cluster.client_file)]
            arguments += [] if role == "prefill" else tower
            for name in names:
                workers.start(name, [role, *arguments])
        _await_ready(workers, len(encoders) + len(prefills) + 1, stages)

        router = Router(requests, concurrency=CONCURRENCY)
        traffic_began = time.monotonic()
        _serve(router, workers, stages)
        traffic_s = time.monotonic() - traffic_began
        counters = _finish(workers, [*encoders, *prefills])
        reference = _encode_directly(list(unique.values()), workers, stages)

    return make_report(
        find_problems(requests, router.encoded, router.read, router.unserved, reference),
        encoded=router.encoded,
        read=router.read,
        requests=len(requests),
        unique_images=len(unique),
        model="SigLIP base with seeded random weights" if weights is None else f"the checkpoint {weights}",
        counters=counters,
        encoders=encoders,
        prefills=prefills,
        traffic_s=traffic_s,
        total_s=time.monotonic() - began,
    )


def _photographs(directory: Path | None, stages: Stages) -> Sequence[Photograph]:
    found = find_photographs(directory)
    if found.unreadable:
        names = ", ".join(path.name for path in found.unreadable[:5])
        more = f", and {len(found.unreadable) - 5} more" if len(found.unreadable) > 5 else ""
        stages.note(f"left out, since Pillow reads no image in it: {names}{more}")
    if found.left_out:
        stages.note(f"only the first {len(found.photographs)} images are used; left out: {found.left_out}")
    return found.photographs


def _await_ready(workers: Workers, count: int, stages: Stages) -> None:
    deadline = time.monotonic() + START_S
    with stages.stage("loading the vision transformer in every encoder", count) as step:
        for _ in range(count):
            name, answer = workers.receive(deadline=deadline)
            if not isinstance(answer, Ready):
                raise _unexpected(name, answer)
            step()


def _serve(router: Router, workers: Workers, stages: Stages) -> None:
    with stages.stage("encoding and reading", router.open) as step:
        while router.open:
            for name, command in router.to_send():
                workers.send(name, command)
            name, answer = workers.receive(deadline=time.monotonic() + SILENCE_S)
            if not isinstance(answer, Served | Missed | Failed):
                raise _unexpected(name, answer)
            before = router.open
            router.answered(name, answer)
            if router.open < before:
                step()


def _finish(workers: Workers, names: Sequence[str]) -> dict[str, Mapping[str, int]]:
    for name in names:
        workers.send(name, Finish())
    counters: dict[str, Mapping[str, int]] = {}
    deadline = time.monotonic() + SILENCE_S
    while len(counters) < len(names):
        name, answer = workers.receive(deadline=deadline)
        if not isinstance(answer, Finished):
            raise _unexpected(name, answer)
        counters[name] = answer.counters
    return counters


def _encode_directly(photographs: Sequence[Photograph], workers: Workers, stages: Stages) -> dict[str, Served]:
    reference: dict[str, Served] = {}
    with stages.stage("encoding each photograph again without the cache, to compare", len(photographs)) as step:
        for number, photograph in enumerate(photographs):
            workers.send(REFERENCE, Encode(number, str(photograph.path), photograph.mm_hash))
            name, answer = workers.receive(deadline=time.monotonic() + SILENCE_S)
            if not isinstance(answer, Served):
                raise _unexpected(name, answer)
            reference[photograph.mm_hash] = answer
            step()
    return reference


def _unexpected(name: str, answer: Answer) -> DemoError:
    return DemoError(f"{name} said {answer}")
