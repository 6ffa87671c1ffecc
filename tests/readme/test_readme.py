"""README's Python examples run as they stand, in order, against a real cluster."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mmcache.config import load

README = Path(__file__).parents[2] / "README.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)


def test_the_python_examples_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from serving import Serving

    examples = blocks("python")
    assert len(examples) >= 4
    with Serving() as serving:
        monkeypatch.setenv("MMCACHE_CONFIG", str(serving.config))
        for example in examples:
            exec(compile(example, "example", "exec"), {"__name__": "readme"})
    printed = capsys.readouterr().out
    assert "stored\ntorch.Size([576, 1152]) [1, 24, 24] local" in printed
    assert "32 local" in printed or "32 store" in printed  # its copy may have made room for others
    assert "['deepstack_0', 'deepstack_1', 'deepstack_2']" in printed


def test_the_settings_example_is_accepted(tmp_path: Path) -> None:
    [example] = blocks("yaml")
    path = tmp_path / "client.yaml"
    path.write_text(example)
    assert load(path, environ={}).client.pool_bytes == 2 << 30
