"""CURVE keys as text and in files: what libzmq takes, and nothing else; what is wrong is told without showing a key."""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis.strategies as st
import pytest
import zmq
from hypothesis import example, given
from zmq.utils import z85

from mmcache.curve import MAX_FILE_BYTES, MAX_KEYS, is_key, parse_keys, read_keys, read_secret_key
from mmcache.errors import ConfigError
from mmcache.private_file import version_of

KEY = "Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID"
OTHER = "D:)Q[IlAW!ahhC2ac:9*A}h:p?([4%wOTJ%JR%cs"
THIRD = "1zaaTIsIk$[k-wg-[TYvGgXJ8(4}ziAYk[:uzEi0"
Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"


@given(st.binary(min_size=32, max_size=32))
def test_every_32_bytes_are_a_key(key: bytes) -> None:
    text = z85.encode(key).decode()
    assert is_key(text)
    assert not text.startswith("#"), "or it would be taken for a comment"


@given(st.text(Z85, min_size=40, max_size=40) | st.text(Z85 + " ~\n", min_size=38, max_size=42))
@example(Z85[-1] * 40)
@example(KEY + "\n")
@example("\u0660" * 40)
def test_what_libzmq_does_not_take_is_none(text: str) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        try:
            socket.setsockopt_string(zmq.CURVE_PUBLICKEY, text)
            taken = len(text) == 40
        except zmq.ZMQError:
            taken = False
        assert is_key(text) == taken


def test_keys_stand_one_a_line_with_names_between_comments() -> None:
    text = f"# clients\n\n#\n{KEY} encoder 3, in rack 7\r\n  {OTHER}\n{THIRD}\tpr\u00e9fill\n#{OTHER} not this one"
    assert parse_keys(text, "file") == {KEY: "encoder 3, in rack 7", OTHER: "", THIRD: "pr\u00e9fill"}


@pytest.mark.parametrize(
    "line",
    [
        KEY[:-1],
        KEY + "0",
        "~" + KEY[1:],
        "\ufeff" + KEY,
        "\u0660" * 40,
        "$$$$$" * 8,
        f"{KEY} a\u2028b",
        f"{KEY} \x1b[31mred",
        f"{KEY} {'n' * 129}",
        "\x00" * 40,
    ],
)
def test_what_is_no_key_is_told_by_its_line_and_never_shown(line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_keys(f"# comment\n{OTHER}\n{line}\n", "controller.client_keys_file: FILE")
    assert str(caught.value).startswith("controller.client_keys_file: FILE, line 3: ")
    assert KEY[1:-1] not in str(caught.value)


def test_there_is_a_bound_on_keys() -> None:
    text = "".join(f"{z85.encode(number.to_bytes(32, 'big')).decode()}\n" for number in range(MAX_KEYS + 1))
    assert len(parse_keys(text.rsplit("\n", 2)[0], "file")) == MAX_KEYS
    with pytest.raises(ConfigError, match="more than 10,000 keys"):
        parse_keys(text, "file")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.touch(mode=0o600)
    path.write_text(f"# comment\n{KEY}\n")
    return path


def refused(path: Path) -> str:
    """Why a secret key is not to be had of a file; a public one is not either, unless the mode alone is to blame."""
    with pytest.raises(ConfigError) as caught:
        read_secret_key(path, "control.secret_key_file")
    message = str(caught.value)
    assert message.startswith(f"control.secret_key_file: {path}")
    assert KEY not in message
    return message


def test_a_secret_key_is_the_one_of_its_file(path: Path) -> None:
    assert read_secret_key(path, "control.secret_key_file") == KEY


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o620, 0o602, 0o644, 0o666])
def test_a_secret_that_others_can_read_is_refused_and_told_how_to_mend(path: Path, mode: int) -> None:
    path.chmod(mode)
    assert refused(path).endswith(f"chmod 600 {path}")


@pytest.mark.parametrize(("mode", "fine"), [(0o644, True), (0o600, True), (0o664, False), (0o646, False)])
def test_a_list_that_others_can_write_to_is_refused(path: Path, mode: int, fine: bool) -> None:
    path.chmod(mode)
    if fine:
        assert read_keys(path, "controller.client_keys_file") == {KEY: ""}
    else:
        with pytest.raises(ConfigError, match="chmod go-w"):
            read_keys(path, "controller.client_keys_file")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "must have one key, not 0"),
        (f"{KEY}\n{OTHER}\n".encode(), "must have one key, not 2"),
        (KEY[:-1].encode(), "line 1: must begin with a key"),
        (b"\xff\xfe" + KEY.encode("utf-16-le"), "not UTF-8"),
        (b"#\n" * (5 << 20), f"larger than {MAX_FILE_BYTES:,} bytes"),
    ],
)
def test_a_file_of_something_else_is_refused(path: Path, content: bytes, words: str) -> None:
    path.write_bytes(content)
    assert words in refused(path)


def test_what_is_no_file_is_refused_and_nobody_waits_for_it(tmp_path: Path) -> None:
    assert "No such file" in refused(tmp_path / "missing")
    assert "Is a directory" in refused(tmp_path)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo, 0o600)
    assert "is no file" in refused(fifo)


def test_a_file_that_was_replaced_has_another_version(path: Path) -> None:
    before = version_of(path)
    assert before == version_of(path)
    other = path.with_name("other")
    other.touch(mode=0o600)
    other.write_bytes(path.read_bytes())
    other.replace(path)
    assert version_of(path) not in (before, None)
    path.unlink()
    assert version_of(path) is None
