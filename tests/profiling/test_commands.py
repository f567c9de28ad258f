"""`graphlint profile` and `graphlint parity`: files, callables, and what goes wrong. No GPU."""

from __future__ import annotations

import json
import os
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
    one_line(run(tmp_path / "notes.txt"), "no Chrome trace and no SQLite database")
    one_line(run(tmp_path / "missing.json"), "no such file")
    (tmp_path / "train.py").write_text("")
    one_line(run(tmp_path / "train.py"), "a program; give a recording, or MODULE:CALLABLE, as in train:make_step")
    one_line(run(tmp_path), "a folder; give one recording in it")
    one_line(run(DATA / "small_gpt.json.gz", "--step-range", "epoch"), "no range")


def test_a_page_that_can_not_be_written(tmp_path: Path) -> None:
    one_line(run(DATA / "detection.json.gz", "--html", tmp_path / "no" / "page.html"), "can't be written")


def test_without_a_gpu_a_callable_is_refused_before_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    one_line(run("no_such_module:step"), "no CUDA device: launch share and gain can only be measured on a GPU")
    parity = CliRunner().invoke(parity_command, ["no_such_module:make_step"])
    one_line(parity, "no CUDA device: parity replays a captured graph; without one `graphlint dry-run`")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["RECORDING", "--steps", 4], "--steps is for a step that is run"),
        (["RECORDING", "--no-measure"], "--measure is for a step that is run"),
        (["train:step", "--wall-us", 100], "--wall-us is for a recording"),
        (["train:step", "--step-range", "iteration"], "--step-range is for a recording"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(arguments: list[object], said: str) -> None:
    one_line(run(*(DATA / "mixed.json.gz" if a == "RECORDING" else a for a in arguments)), said)


def test_what_can_not_be_written_is_told_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for option in ("--html", "--save-trace", "-o"):
        one_line(run("no_such_module:step", option, tmp_path / "no" / "file"), "can't be written (there is no folder")
    one_line(
        CliRunner().invoke(parity_command, ["no_such_module:step", "-o", str(tmp_path / "no" / "file")]), "no folder"
    )


def test_a_recording_whose_page_has_no_letters_beyond_ascii(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "graphlint", "profile", str(DATA / "mixed.json.gz")]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert "as a graph   |###" in done.stdout and " us)" in done.stdout


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("missing_module:step", "importing missing_module raises ModuleNotFoundError"),
        ("steps_here:missing", "has no missing"),
        ("steps_here:number", "can't be called"),
        ("steps_here:needs_input", "return (step, batches)"),
        ("steps_here:broken", "raises ValueError: no data"),
        ("steps_here:leaves", "raises SystemExit: 3"),
        ("leaves_here:step", "importing leaves_here raises SystemExit: 4"),
        ("steps_here.py:broken", "give the module and not its file: steps_here:broken"),
        ("./steps_here.py:broken", "give the module and not its file: steps_here:broken"),
        ("steps_here:odd_batches", "returns a int for its batches"),
        ("steps_here:no_batches", "there are no batches"),
        (":", "give MODULE:CALLABLE"),
    ],
)
def test_targets_that_are_no_step(target: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "steps_here.py").write_text(
        "number = 3\ndef needs_input(x): pass\ndef broken():\n    raise ValueError('no data')\n"
        "def leaves():\n    raise SystemExit(3)\n"
        "def odd_batches():\n    return print, 7\ndef no_batches():\n    return print, []\n"
    )
    (tmp_path / "leaves_here.py").write_text("raise SystemExit(4)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
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
