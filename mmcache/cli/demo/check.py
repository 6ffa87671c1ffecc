"""The demo's check: every embedding against a direct encode, and no photograph encoded twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from mmcache.cli.demo.protocol import Failed, Missed, Served
from mmcache.cli.demo.traffic import Request


def find_problems(
    requests: Sequence[Request],
    encoded: Sequence[Served],
    read: Sequence[Served],
    unserved: Sequence[Missed | Failed],
    reference: Mapping[str, Served],
) -> list[str]:
    """Everything that must not be, one sentence each.

    Args:
        requests: all requests, by number.
        encoded: what encoders answered.
        read: what prefill processes answered.
        unserved: requests that ended without an embedding.
        reference: by mm_hash, a direct encode of each photograph.
    """
    problems: list[str] = []
    for answer in unserved:
        name = requests[answer.request].photograph.path.name
        what = answer.error if isinstance(answer, Failed) else "its prefill process read nothing"
        problems.append(f"request {answer.request} ({name}): {what}")
    for who, answers in (("an encoder", encoded), ("a prefill process", read)):
        for served in answers:
            photograph = requests[served.request].photograph
            direct = reference[photograph.mm_hash]
            where = f"request {served.request} ({photograph.path.name}): what {who} got ({served.source})"
            if served.key != direct.key:
                problems.append(f"{where} is filed under another key than the photograph's")
            elif served.digest != direct.digest:
                problems.append(f"{where} differs from a direct encode")
    encodes = Counter(served.key.mm_hash for served in encoded if served.encode_ms is not None)
    names = {request.photograph.mm_hash: request.photograph.path.name for request in requests}
    problems += [f"{names.get(mm_hash, mm_hash)} was encoded {n} times" for mm_hash, n in encodes.items() if n > 1]
    never = {served.key.mm_hash for served in encoded} - encodes.keys()
    problems += [
        f"{names.get(mm_hash, mm_hash)} was served, but no encoder says that it encoded it" for mm_hash in never
    ]
    return problems
