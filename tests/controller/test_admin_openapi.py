"""The API against its own description: whatever is sent, the answer is one that is described, and never a fault."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import schemathesis
from admin_api import OPERATOR, PATIENCE_S, AdminApi, bearer
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from mmcache.controller.admin import models, service

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
EXAMPLES = 15


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdminApi]:
    with AdminApi(tmp_path_factory.mktemp("admin")) as api:
        yield api


OPERATIONS = [
    ("GET", "/healthz"),
    ("GET", "/metrics"),
    ("GET", "/v1/stats"),
    ("GET", "/v1/capacity"),
    ("POST", "/v1/invalidations"),
    ("GET", "/v1/invalidations"),
    ("GET", "/v1/invalidations/{number}"),
    ("POST", "/v1/pins"),
    ("GET", "/v1/pins"),
    ("DELETE", "/v1/pins/{number}"),
    ("POST", "/v1/lookup"),
    ("GET", "/v1/entries"),
    ("GET", "/v1/entries/{name}"),
    ("GET", "/v1/sessions"),
    ("GET", "/v1/audit"),
]


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_no_request_is_answered_by_a_fault(api: AdminApi, method: str, path: str, mode: GenerationMode) -> None:
    described = schemathesis.openapi.from_url(f"{api.service.address}/openapi.json")

    @settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(case=described[path][method].as_strategy(generation_mode=mode))
    def check(case: schemathesis.Case) -> None:
        for place, name in ((case.body, "timeout"), (case.query, "wait")):
            if isinstance(place, dict) and isinstance(place.get(name), (int, float)):
                place[name] = min(place[name], 0)
        case.call_and_validate(headers=bearer(OPERATOR), checks=CHECKS)

    try:
        check()
    except Unsatisfiable:
        assert mode is GenerationMode.NEGATIVE, "nothing can be wrong with what takes nothing"


ODD = [
    "..",
    "../../etc/passwd",
    "..%2f..%2fetc%2fpasswd",
    "%2e%2e/%2e%2e/",
    "%00",
    "%ff%fe",
    "%ed%a0%80",
    "%c0%ae%c0%ae",
    "a%0d%0aX-Injected:%201",
    "%E2%80%AE%F0%9F%92%A9",
    "ÿ",
    "%",
    "%zz",
    ";x=1",
    "mmc1.x.y.z.0",
    "mmc1." + "a" * 16 + "." + "0" * 64 + "." + "0" * 64 + ".0",
    "mmc1." + "a" * 16 + "." + "0" * 64 + "." + "0" * 64 + "." + "9" * 19,
    "x" * 5000,
]
QUERIES = {
    "/v1/entries": [*models.EntriesPage.model_fields, "unknown"],
    "/v1/sessions": ["after", "limit", "unknown"],
    "/v1/audit": ["before", "limit", "action", "actor", "unknown"],
    "/v1/invalidations": ["before", "limit", "unknown"],
    "/v1/invalidations/1": ["wait", "unknown"],
}


@pytest.mark.parametrize("odd", ODD)
def test_odd_paths_and_queries_are_refused_or_find_nothing(api: AdminApi, odd: str) -> None:
    raw = odd.encode()
    paths = [b"/v1/entries/", b"/v1/invalidations/", b"/v1/", b"/"]
    targets = [path + raw for path in paths]
    targets += [f"{path}?{name}=".encode() + raw for path, names in QUERIES.items() for name in names]
    for target in targets:
        head, _, body = exchange(api, target).partition(b"\r\n\r\n")
        status = int(head.split()[1])
        assert status < 500, (target, body)
        assert b"x-injected" not in head.lower()
        if status >= 400 and b"application/problem+json" not in head:
            assert body == b"Invalid HTTP request received.", (target, body)


def exchange(api: AdminApi, target: bytes) -> bytes:
    """The answer to a request whose target is sent as it is."""
    host, _, port = api.service.address.removeprefix("http://").rpartition(":")
    request = b"GET " + target + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nAuthorization: Bearer "
    with socket.create_connection((host, int(port)), PATIENCE_S) as connection:
        connection.sendall(request + OPERATOR.encode() + b"\r\n\r\n")
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def test_the_description_is_complete(api: AdminApi) -> None:
    description = api.connect(None).get("/openapi.json").json()
    paths = description["paths"]
    assert set(paths) == {
        "/healthz",
        "/readyz",
        "/metrics",
        "/v1/stats",
        "/v1/invalidations",
        "/v1/invalidations/{number}",
        "/v1/capacity",
        "/v1/pins",
        "/v1/pins/{number}",
        "/v1/lookup",
        "/v1/entries",
        "/v1/entries/{name}",
        "/v1/sessions",
        "/v1/audit",
    }
    for path, methods in paths.items():
        for method, operation in methods.items():
            assert operation["description"], (method, path)
            problem = operation["responses"]["422"]["content"]
            assert set(problem) == {"application/problem+json"}, (method, path)
            public = path in ("/healthz", "/readyz")
            assert ("security" not in operation) == public, (method, path)
    for name in ("NewInvalidation", "Key", "Keys", "FollowedInvalidation", "Entry", "Session", "ProblemDocument"):
        known = description["components"]["schemas"][name]
        fields = known["properties"].values()
        assert "examples" in known or any("examples" in field for field in fields), name


def test_every_example_of_an_invalidation_is_taken(api: AdminApi) -> None:
    examples = api.client.get("/openapi.json").json()["components"]["schemas"]["NewInvalidation"]["examples"]
    for example in examples:
        response = api.client.post("/v1/invalidations", json=example, timeout=PATIENCE_S)
        assert response.status_code in (200, 201), response.text


@pytest.mark.parametrize("answered", [0, 2])
@pytest.mark.parametrize("begun", [b"", b"GET /heal"])
def test_a_connection_without_a_request_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answered: int, begun: bytes
) -> None:
    monkeypatch.setattr(service, "_REQUEST_PATIENCE_S", 1)
    with AdminApi(tmp_path) as api:
        host, _, port = api.service.address.removeprefix("http://").rpartition(":")
        with socket.create_connection((host, int(port)), PATIENCE_S) as connection:
            for _ in range(answered):
                connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
                while not connection.recv(4096).endswith(b"}"):
                    pass
            connection.sendall(begun)
            assert connection.recv(4096) == b""
