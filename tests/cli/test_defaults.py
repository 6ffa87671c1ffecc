"""Commands that were told of no cluster say so when the default one does not answer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from commands import KEY, run
from safetensors.torch import save_file

from mmcache.config import Settings

NOBODY = "127.0.0.1:9"
UNSET = {"MMCACHE_CONTROL__ADDRESS": None, "MMCACHE_STORE__MASTER": None, "MMCACHE_CLIENT__CONNECT_TIMEOUT": "1s"}
CONTROLLER = f"the controller at {Settings().control.address}"
MASTER = f"the store's master at {Settings().store.master}"


@pytest.fixture
def item(tmp_path: Path) -> Path:
    file = tmp_path / "item.safetensors"
    save_file({"embedding": torch.ones(8)}, file)
    return file


@pytest.mark.parametrize("command", ["get", "put", "stats"])
def test_a_cluster_that_nobody_named_is_told_where_it_does_not_answer(command: str, item: Path) -> None:
    key = () if command == "stats" else (*KEY, "--mm-hash", "item")
    arguments = (command, *([item] if command == "put" else []), *key, "--json")
    told = run(*arguments, **{**UNSET, "MMCACHE_STORE__MASTER": NOBODY})
    assert told.status == 1
    assert all(word in told.err for word in (CONTROLLER, "No configuration was given", "--config", "MMCACHE_CONFIG"))
    assert MASTER not in told.err, "which was given"
    assert told.json, "and nothing else on stdout"
    both = {**UNSET, "MMCACHE_CONTROL__ADDRESS": f"tcp://{NOBODY}", "MMCACHE_STORE__MASTER": NOBODY}
    assert "No configuration" not in run(*arguments, **both).err


@pytest.mark.parametrize("arguments", [("lookup", *KEY, "--mm-hash", "item"), ("invalidate", *KEY)])
def test_a_controller_that_nobody_named_is_told_where_it_does_not_answer(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmcache.cli.control_session.why_no_session", lambda _: "nobody answers")  # whoever may listen
    told = run(*arguments, **UNSET)
    assert told.status == 1
    assert CONTROLLER in told.err
    assert MASTER not in told.err, "which is not asked"
    config = tmp_path / "mmcache.yaml"
    config.write_text(f"control: {{address: 'tcp://{NOBODY}'}}\n")
    for given in (run(*arguments, "-c", config, **UNSET), run(*arguments, config=config, **UNSET)):
        assert (given.status, "No configuration" in given.err) == (1, False)
