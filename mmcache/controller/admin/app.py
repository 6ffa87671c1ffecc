"""The application: its routes, and what holds for all of them."""

from __future__ import annotations

from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from mmcache.controller.admin import browsing, capacity, health, invalidating, pinning, problems
from mmcache.controller.admin.bodies import BoundedBodies
from mmcache.controller.admin.desk import Desk
from mmcache.controller.admin.health import Prober
from mmcache.controller.admin.models import ProblemDocument

_PROBLEM_SCHEMA: Final = {"$ref": "#/components/schemas/ProblemDocument"}
_RESPONSES: Final[dict[int | str, dict[str, Any]]] = {
    status: {"model": ProblemDocument, "description": description}
    for status, description in {
        400: "Not JSON",
        401: "No token, or one that is unknown or has expired",
        403: "The token's role is not enough",
        404: "There is no such thing",
        408: "The body did not come in time",
        409: "The idempotency key is another invalidation's",
        413: "The body is too large",
        422: "Something in the request is not what it must be",
        503: "Too much is under way, or the controller is ending",
        504: "The controller has not answered in time",
    }.items()
}


def make_app(desk: Desk, *, version: str) -> FastAPI:
    """The application. Its pages for browsers are left out: they would load code from elsewhere."""
    app = FastAPI(
        title="mmcache controller",
        version=version,
        description="A shared embedding cache's controller, for operators.",
        docs_url=None,
        redoc_url=None,
        responses=_RESPONSES,
        redirect_slashes=False,
    )
    app.state.desk = desk
    app.state.prober = Prober(desk)
    for router in (health.router, capacity.router, invalidating.router, pinning.router, browsing.router):
        app.include_router(router)
    problems.install(app)
    described: dict[str, Any] = {}

    def describe() -> dict[str, Any]:
        if not described:
            described.update(_described(app))
        return described

    app.openapi = describe  # type: ignore[method-assign]  # as FastAPI has it
    app.add_middleware(BoundedBodies)
    return app


def _described(app: FastAPI) -> dict[str, Any]:
    """The description, in which problems have their own media type, and only what wants a token refuses one."""
    description = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    for operations in description["paths"].values():
        for operation in operations.values():
            responses = operation["responses"]
            for status in [] if "security" in operation else ["401", "403"]:
                responses.pop(status, None)
            for response in responses.values():
                if any(content.get("schema") == _PROBLEM_SCHEMA for content in response.get("content", {}).values()):
                    response["content"] = {problems.MEDIA_TYPE: {"schema": _PROBLEM_SCHEMA}}
    return description
