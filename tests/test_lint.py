"""From text to report with the real engine: what the user writes in comments and settings reaches the verdict, and the library says what the command says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kit import command, project

import graphlint
from graphlint.config import Config
from graphlint.findings import LintResult

CAPTURE = """\
import torch
from model import forward

graph = torch.cuda.CUDAGraph()
x = torch.zeros(8, device="cuda")
forward(x)
with torch.cuda.graph(graph):
    y = forward(x)
"""
MODEL = """\
def forward(x):
    return scale(x)


def scale(x):
    return x / x.max().item()
"""


def lint(root: Path, **settings: object) -> LintResult:
    """Lints a folder without a cache."""
    return graphlint.lint(root, Config(root=str(root), cache=False, **settings))  # type: ignore[arg-type]


def rows(result: LintResult) -> list[tuple[str, int]]:
    """Code and row of each finding."""
    return [(finding.code, finding.at.row) for finding in result.findings]


def test_the_way_leads_from_the_capture_to_the_fault(tmp_path: Path) -> None:
    project(tmp_path, {"engine.py": CAPTURE, "model.py": MODEL})
    (finding,) = lint(tmp_path).findings
    assert finding.code == "CG101" and finding.at.filename.endswith("model.py") and finding.at.row == 6
    assert finding.region and finding.region.filename.endswith("engine.py") and finding.region.row == 7
    assert [(step.row, step.name) for step in finding.trace] == [(8, "forward"), (2, "scale")]


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("model.py", ".item()", ".item()  # graphlint: ignore[host-sync] -- meant"),
        ("model.py", ".item()", ".item()  # gpu-sync-ok: meant"),
        ("model.py", "return scale(x)", "return scale(x)  # noqa: CG101"),
        ("engine.py", "    y = forward(x)", "    y = forward(x)  # graphlint: ignore"),
    ],
)
def test_a_comment_at_the_fault_or_on_the_way_silences_it(tmp_path: Path, file: str, old: str, new: str) -> None:
    texts = {"engine.py": CAPTURE, "model.py": MODEL}
    texts[file] = texts[file].replace(old, new)
    project(tmp_path, texts)
    result = lint(tmp_path)
    assert rows(result) == [] and len(result.suppressed) == 1


def test_a_comment_that_no_longer_silences_anything_is_noted(tmp_path: Path) -> None:
    sound = MODEL.replace(".item()", "  # graphlint: ignore[host-sync] -- was meant")
    project(tmp_path, {"engine.py": CAPTURE, "model.py": sound})
    assert rows(lint(tmp_path)) == [("CG900", 6)]
    assert all(region.resolved for region in lint(tmp_path).regions)


def test_an_unresolved_call_keeps_unused_comments_quiet(tmp_path: Path) -> None:
    sound = MODEL.replace(".item()", "  # graphlint: ignore[host-sync] -- was meant")
    project(
        tmp_path,
        {"engine.py": CAPTURE.replace("    y =", "    import plugin; plugin.run(x)\n    y ="), "model.py": sound},
    )
    result = lint(tmp_path)
    assert result.regions and (rows(result) == [] or all(region.resolved for region in result.regions))


def test_declared_regions_are_regions(tmp_path: Path) -> None:
    text = "import torch\nfrom mylib import capture\n\nx = torch.zeros(8, device='cuda')\nwith capture() as g:\n    y = x.max().item()\n"
    helper = "import contextlib\nimport _native\n\n@contextlib.contextmanager\ndef capture():\n    _native.begin()\n    yield\n    _native.end()\n"
    project(tmp_path, {"a.py": text})
    assert rows(lint(tmp_path)) == []
    assert rows(lint(tmp_path, regions=("mylib.capture",))) == [("CG101", 6)]
    project(tmp_path, {"mylib.py": helper})
    assert rows(lint(tmp_path, regions=("mylib.capture",))) == [("CG101", 6)]


def test_verdicts_depend_on_the_torch_release(tmp_path: Path) -> None:
    text = CAPTURE.replace("from model import forward\n", "").replace(
        "forward(x)", "torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))"
    )
    project(tmp_path, {"a.py": text})
    assert "CG113" in {finding.code for finding in lint(tmp_path, target_torch=(2, 11)).findings}
    assert "CG113" not in {finding.code for finding in lint(tmp_path, target_torch=(2, 13)).findings}


def test_the_library_says_what_the_command_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project(tmp_path, {"pyproject.toml": "", "engine.py": CAPTURE, "model.py": MODEL})
    monkeypatch.chdir(tmp_path)
    (finding,) = graphlint.lint(["engine.py", tmp_path / "model.py"]).findings
    (row,) = json.loads(command(".", "--output-format", "json", cwd=tmp_path).stdout)
    assert (row["filename"], row["location"]["row"], row["message"]) == (
        finding.at.filename,
        finding.at.row,
        finding.message,
    )


def test_standard_input_is_seen_by_the_rest_of_the_project(tmp_path: Path) -> None:
    project(tmp_path, {"pyproject.toml": "", "engine.py": CAPTURE, "model.py": MODEL.replace(".item()", "")})
    clean = command("--stdin-filename", "model.py", cwd=tmp_path, stdin=MODEL.replace(".item()", ""))
    assert clean.returncode == 0, clean.stdout
    done = command("--stdin-filename", "model.py", "--output-format", "concise", cwd=tmp_path, stdin=MODEL)
    assert done.stdout.startswith("model.py:6:16: CG101")


def test_results_are_sorted_and_the_same_every_time(tmp_path: Path) -> None:
    texts = {f"m{number}.py": CAPTURE.replace("from model", f"from n{number}") for number in range(5)}
    texts |= {f"n{number}.py": MODEL for number in range(5)}
    project(tmp_path, texts)
    first = lint(tmp_path)
    assert [finding.at.filename[-5:] for finding in first.findings] == [f"n{number}.py" for number in range(5)]
    assert lint(tmp_path) == first
