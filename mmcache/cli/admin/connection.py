"""The controller's admin API, for one command: where it is, by which token, and what its refusals mean."""

from __future__ import annotations

import ipaddress
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from mmcache.cli.admin.text import printable
from mmcache.cli.errors import AdminUnavailable, InputError
from mmcache.config import Settings
from mmcache.errors import ConfigError
from mmcache.http_call import Answer, NoAnswer, call
from mmcache.private_file import checked_token, read_token
from mmcache.setting_kinds import BadValue, Url

TOKEN_VARIABLE: Final = "MMCACHE_TOKEN"  # noqa: S105 (its name)
PATIENCE_S: Final = 30.0
_MOST_BYTES: Final = 32 << 20
_PROBLEM: Final = "application/problem+json"
_USAGE: Final = frozenset({400, 401, 403, 404, 422})
_HOW_TO_GIVE_A_TOKEN: Final = (
    f"Set {TOKEN_VARIABLE}, or control.token_file to a file, to a token of those that the controller knows "
    "(controller.admin_tokens)."
)
_NO_QUERY: Final[Mapping[str, object]] = {}

Decoded = TypeVar("Decoded")


class ProblemDocument(msgspec.Struct):
    """What is read of RFC 9457's."""

    detail: str = ""
    title: str = ""


class AdminApi:
    """Asks it.

    Args:
        settings: where it is, unless `url` says so.
        url: the value of --admin.
        environ: may hold the token.

    Raises:
        ConfigError, InputError: its place or the token cannot be told; the message says what to set.
    """

    def __init__(self, settings: Settings, url: str | None, environ: Mapping[str, str]) -> None:
        self.url = address_of(settings, url)
        self._token = _token(settings, environ)

    def get(
        self,
        path: str,
        kind: type[Decoded],
        query: Mapping[str, object] = _NO_QUERY,
        *,
        timeout: float = PATIENCE_S,
    ) -> Decoded:
        """What is answered to a question; of the query, what is not None. Errors: see `post`."""
        given = {name: value for name, value in query.items() if value is not None}
        target = f"{path}?{urllib.parse.urlencode(given)}" if given else path
        return self._decoded(self._call("GET", target, None, timeout), kind)

    def post(self, path: str, kind: type[Decoded], body: object, *, timeout: float = PATIENCE_S) -> Decoded:
        """What is answered to a body, within `timeout` seconds.

        Raises:
            InputError: it is refused, for what the command was given or the token.
            AdminUnavailable: there is no answer, or none that can be used.
        """
        return self._decoded(self._call("POST", path, msgspec.json.encode(body), timeout), kind)

    def _call(self, method: str, target: str, body: bytes | None, timeout: float) -> Answer:
        headers = {} if body is None else {"Content-Type": "application/json"}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        try:
            return call(method, self.url + target, headers=headers, body=body, timeout=timeout, most_bytes=_MOST_BYTES)
        except NoAnswer as error:
            advice = "Is controller.admin set where the controller runs, and can it be reached from here?"
            raise AdminUnavailable(f"the admin API at {self.url}: {error}. {advice}") from error

    def _decoded(self, answer: Answer, kind: type[Decoded]) -> Decoded:
        if 200 <= answer.status < 300:
            try:
                return msgspec.json.decode(answer.body, type=kind)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise self._is_another(answer) from error
        if 300 <= answer.status < 400:
            raise AdminUnavailable(
                f"{self.url} refers to another place, which is not followed: give that one, by --admin"
            )
        if answer.media_type != _PROBLEM:
            raise self._is_another(answer)
        try:
            problem = msgspec.json.decode(answer.body, type=ProblemDocument)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self._is_another(answer) from error
        text = printable(problem.detail or problem.title)
        if answer.status == 401:
            text += f". {_HOW_TO_GIVE_A_TOKEN}"
        raise (InputError if answer.status in _USAGE else AdminUnavailable)(f"{answer.status}: {text}")

    def _is_another(self, answer: Answer) -> AdminUnavailable:
        text = f"what answers at {self.url} ({answer.status}) is no admin API of mmcache, or one of another version"
        return AdminUnavailable(f"{text}: the setting is controller.admin")


def address_of(settings: Settings, option: str | None) -> str:
    """The API's URL: the option's, else that of control.admin, else what controller.admin makes of it."""
    if option is not None:
        try:
            return str(Url().check(option))
        except BadValue as error:
            raise InputError(f"--admin {error}") from error
    if settings.control.admin is not None:
        return settings.control.admin
    if settings.controller.admin is None:
        raise ConfigError(
            "where the admin API is, nobody says: give --admin URL, or set control.admin. "
            "The controller serves it where controller.admin is set"
        )
    host, _, port = settings.controller.admin.rpartition(":")
    if port.strip("0") == "":
        raise ConfigError("controller.admin takes any free port, which the controller prints: give it by --admin URL")
    return f"http://{_reachable(host)}:{port}"


def _reachable(host: str) -> str:
    """A host to connect to, in the place of one that means every address."""
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return host
    if not address.is_unspecified:
        return host
    return "127.0.0.1" if address.version == 4 else "[::1]"


def _token(settings: Settings, environ: Mapping[str, str]) -> str | None:
    if (text := environ.get(TOKEN_VARIABLE)) is not None:
        return checked_token(text.strip(), f"environment variable {TOKEN_VARIABLE}")
    if settings.control.token_file is None:
        return None
    try:
        return read_token(Path(settings.control.token_file))
    except ConfigError as error:
        raise ConfigError(f"control.token_file: {error}") from error
