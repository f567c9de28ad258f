"""What the README shows for the guard runs as it stands (on the CPU backend with `cuda` read as `cpu`)."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from graphlint.runtime import backend  # noqa: E402

PAGE = Path(__file__).resolve().parents[2] / "README.md"


def test_the_readmes_example_runs(
    kit: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    code = next(block for block in blocks if "capture_safe" in block)
    monkeypatch.setattr(backend, "_default", kit.backend)
    if kit.device == "cpu":
        # a host optimizer can't be capturable: a fused one with a tensor lr stands in
        code = code.replace('"cuda"', '"cpu"').replace("lr=1e-3, capturable=True", "lr=torch.tensor(1e-3), fused=True")
        assert "fused=True" in code
    torch.use_deterministic_algorithms(False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        space: dict[str, Any] = {"__name__": "readme"}
        exec(compile(code, str(PAGE), "exec"), space)
    guard, shown = space["train_step"], capsys.readouterr().out
    assert guard.stats["replays"] > 15
    assert guard.stats["captures"] == 1
    assert guard.stats["eager"] == 0
    assert "replay against eager" in shown
    assert float(space["optimizer"].param_groups[0]["lr"]) == pytest.approx(1e-3 * 0.999**20)
    assert space["scheduler"].last_epoch == 20
