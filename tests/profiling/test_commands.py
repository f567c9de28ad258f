"""`graphlint profile` and `graphlint parity`: files, callables, and what goes wrong. No GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from graphlint.runtime.cli_profile import parity_command, profile_command

DATA = Path(__file__).parent / "data"


def run(*args: object) -> Result:
    return CliRunner().invoke(profile_command, [str(a) for a in args])


def test_a_recording() -> None:
    result = run(DATA / "small_gpt.json.gz")
    assert result.exit_code == 0
    assert "Do this first." in result.output and "What to do" in result.output


def test_json_and_page_of_a_recording(tmp_path: Path) -> None:
    page, out = tmp_path / "page.html", tmp_path / "report.json"
    result = run(DATA / "large_gpt.json.gz", "--output-format", "json", "-o", out, "--html", page)
    assert result.exit_code == 0 and result.output == ""
    assert json.loads(out.read_text())["advice"]["verdict"] == "not worth it"
    assert page.read_text().startswith("<!doctype html>")


def test_the_wall_time_of_a_step_without_a_profiler() -> None:
    recorded = json.loads(run(DATA / "small_gpt.json.gz", "--output-format", "json").output)
    true = json.loads(run(DATA / "small_gpt.json.gz", "--output-format", "json", "--wall-us", 5000).output)
    assert true["whole"]["wall"] == 5000 < recorded["whole"]["wall"]


def one_line(result: Result, said: str) -> None:
    assert result.exit_code == 2
    assert said in result.output and "Traceback" not in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_what_is_no_recording(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    one_line(run(tmp_path / "notes.txt"), "no Chrome trace")
    one_line(run(tmp_path / "missing.json"), "no such file")
    one_line(run(DATA / "small_gpt.json.gz", "--step-range", "epoch"), "no range")


def test_a_page_that_can_not_be_written(tmp_path: Path) -> None:
    one_line(run(DATA / "detection.json.gz", "--html", tmp_path / "no" / "page.html"), "can't be written")


def test_without_a_gpu_a_callable_is_refused_before_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    one_line(run("no_such_module:step"), "no CUDA device")
    one_line(CliRunner().invoke(parity_command, ["no_such_module:make_step"]), "no CUDA device")


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("missing_module:step", "importing missing_module raises ModuleNotFoundError"),
        ("steps_here:missing", "has no missing"),
        ("steps_here:number", "can't be called"),
        ("steps_here:needs_input", "return (step, batches)"),
        ("steps_here:broken", "raises ValueError: no data"),
    ],
)
def test_targets_that_are_no_step(target: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "steps_here.py").write_text(
        "number = 3\ndef needs_input(x): pass\ndef broken():\n    raise ValueError('no data')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("steps_here", None)
    one_line(run(target), said)
    one_line(CliRunner().invoke(parity_command, [target]), said)


def test_judging_a_recording_needs_no_torch() -> None:
    code = f"""
import sys
sys.modules["torch"] = None  # an import of torch would raise
from graphlint.runtime.profiling import profile_file
report = profile_file({str(DATA / "mixed.json.gz")!r})
report.to_text(), report.to_json(), report.to_html()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
