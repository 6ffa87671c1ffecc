"""Who comes in, by questions in ZAP and a list that changes; and a server that is asked by peers of all kinds."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import zmq
from hypothesis import given
from zmq.utils import z85

from mmcache.config import ControllerSettings
from mmcache.controller.admission import Admission, decide
from mmcache.errors import ConfigError

KEY = bytes(range(32))
LISTED = {z85.encode(KEY).decode(): "friend"}
QUESTION = [b"1.0", b"\x00\x00\x00\x01", b"mmcache", b"10.0.0.7", b"", b"CURVE", KEY]


def test_who_is_listed_comes_in_by_its_key_and_nobody_else() -> None:
    answer = decide(QUESTION, LISTED)
    assert (answer.frames[:3], answer.refused) == ([b"1.0", QUESTION[1], b"200"], "")
    assert answer.frames[4] == z85.encode(KEY)
    answer = decide(QUESTION, {})
    assert (answer.frames[:3], answer.refused) == ([b"1.0", QUESTION[1], b"400"], "refused.key")
    assert answer.frames[4] == b""
    assert answer.address == "10.0.0.7"
    assert z85.encode(KEY).decode() in answer.detail


@given(st.lists(st.binary(max_size=40), max_size=9), st.integers(0, 6), st.binary(max_size=300))
def test_no_other_question_lets_anybody_in(frames: list[bytes], at: int, frame: bytes) -> None:
    changed = [*QUESTION[:at], frame, *QUESTION[at + 1 :]]
    for question in (frames, changed, QUESTION[:at], [*QUESTION, frame]):
        answer = decide(question, LISTED)
        sound = len(question) == 7 and (question[0], *question[5:]) == (b"1.0", b"CURVE", KEY)
        assert (answer.frames[2] == b"200") == sound
        assert len(answer.frames) == 6
        assert bool(answer.refused) != sound
        assert sound or answer.frames[4] == b""


@pytest.fixture
def files(tmp_path):
    public, secret = zmq.curve_keypair()
    own, listed = tmp_path / "own", tmp_path / "listed"
    own.touch(mode=0o600)
    own.write_bytes(secret)
    listed.touch(mode=0o644)
    listed.write_bytes(public)
    return own, listed


def test_the_settings_decide_whether_there_is_one(files) -> None:
    own, listed = files
    assert Admission.of(ControllerSettings()) is None
    admission = Admission.of(ControllerSettings(secret_key_file=str(own), client_keys_file=str(listed)))
    assert admission is not None
    assert admission.public_key == listed.read_bytes()


def test_bad_files_are_refused_at_the_start_by_the_names_of_their_settings(files) -> None:
    own, listed = files
    with pytest.raises(ConfigError, match=r"controller\.secret_key_file: .*cannot be read"):
        Admission(own.with_name("missing"), listed)
    with pytest.raises(ConfigError, match=r"controller\.client_keys_file: .*Is a directory"):
        Admission(own, listed.parent)
    own.chmod(0o640)
    with pytest.raises(ConfigError, match=r"controller\.secret_key_file: .*chmod 600"):
        Admission(own, listed)


def test_the_list_is_read_again_when_it_changes_and_at_most_once_a_second(files) -> None:
    own, listed = files
    admission = Admission(own, listed)
    key = listed.read_text()

    class Frame:
        def get(self, name: str) -> str:
            return {"User-Id": key}[name]

    counted: list[str] = []
    admission.look(100.0, counted.append)
    listed.write_text("# nobody at all\n")
    admission.look(100.9, counted.append)
    assert admission.allows(Frame())
    admission.look(101.0, counted.append)
    assert not admission.allows(Frame())
    listed.write_text("nonsense")
    admission.look(102.0, counted.append)
    admission.look(103.0, counted.append)
    assert counted == ["client_keys_broken"]
    assert not admission.allows(Frame())
    listed.write_text(f"{key}\n")
    admission.look(104.0, counted.append)
    assert admission.allows(Frame())
