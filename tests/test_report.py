"""What people and programs read: the words, the frames, and the shapes that others validate."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import jsonschema
import pytest
from kit import finding

from graphlint.config import FORMATS
from graphlint.findings import (
    Edit,
    Finding,
    Fix,
    LintResult,
    Place,
    Problem,
    RegionInfo,
    RegionRef,
    Related,
    Step,
    Suppressed,
)
from graphlint.report import render, text
from graphlint.report.fingerprint import fingerprints
from graphlint.report.frame import frame
from graphlint.report.view import View

SCHEMA = json.loads((Path(__file__).parent / "data/sarif-schema-2.1.0.json").read_text())

ENGINE = """\
import torch
from model import Decoder

class Engine:
    def capture(self):
        with torch.cuda.graph(self.graph):
            self.out = self.decoder.step(self.x)
"""
MODEL = """\
class Decoder:
    def step(self, x):
        return normalise(x)


def normalise(x):
    scale = x.max().item()
    return x / scale
"""


def view(**texts: str) -> View:
    """A view of texts that are on no disk: `model=...` is `model.py`."""
    return View(base="/p", given={f"{name}.py": text.encode() for name, text in texts.items()})


def fault() -> Finding:
    """A read two calls away from the capture."""
    return finding(
        "model.py", 7, 13, 27,
        message="`x.max().item()` waits for the GPU and brings one value to the host",
        help="stay on the device: `scale = x.max()`",
        region=RegionRef("engine.py", 6, "graph"),
        trace=(Step("engine.py", 7, "Decoder.step"), Step("model.py", 3, "normalise")),
        related=(Related("engine.py", 7, "`x` is on the GPU"),),
        fix=Fix("drop the read", (Edit(Place("model.py", 7, 20, 7, 27), ""),), safe=True),
    )  # fmt: skip


def whole() -> LintResult:
    """A result in which every field is used."""
    note = finding("engine.py", 6, 9, 43, code="CG205", name="dropout-in-region", family="rng", severity="note")
    return LintResult(
        (fault(), note),
        problems=(Problem("bad.py", 3, "is no valid Python: invalid syntax"), Problem("gone.py", 0, "does not exist")),
        regions=(RegionInfo("engine.py", 6, 7, "graph", "torch.cuda.graph", "a block", True),),
        files=2,
        unresolved=(Problem("engine.py", 7, "`self.hook` is not known"),),
        suppressed=(Suppressed(fault(), "meant", "model.py", 7),),
    )


def test_full_shows_the_line_the_way_and_the_cure() -> None:
    assert (
        render(LintResult((fault(),)), "full", view(engine=ENGINE, model=MODEL))
        == """\
model.py:7:13: CG101 [*] host-sync: `x.max().item()` waits for the GPU and brings one value to the host
  |
6 | def normalise(x):
7 |     scale = x.max().item()
  |             ^^^^^^^^^^^^^^ crash
  |
  = reached from: the capture, through Decoder.step and normalise
      engine.py:6  with torch.cuda.graph(self.graph):
      engine.py:7    self.out = self.decoder.step(self.x)
      model.py:3       return normalise(x)
  = see also: `x` is on the GPU, at engine.py:7
      self.out = self.decoder.step(self.x)
  = help: stay on the device: `scale = x.max()`

"""
    )


def test_a_fault_in_the_region_itself_names_the_capture() -> None:
    here = finding("model.py", 7, 13, 27, region=RegionRef("engine.py", 6, "graph"))
    assert "= captured at: engine.py:6  with torch.cuda.graph(self.graph):" in render(
        LintResult((here,)), "full", view(engine=ENGINE, model=MODEL)
    )


def test_a_long_way_is_shortened_in_the_middle() -> None:
    steps = tuple(Step("model.py", row % 8 + 1, f"f{row}") for row in range(20))
    shown = render(
        LintResult((finding("model.py", 7, region=RegionRef("engine.py", 6, "graph"), trace=steps),)),
        "full",
        view(engine=ENGINE, model=MODEL),
    )
    assert "through f0, f1, 17 more and f19" in shown and "13 more calls" in shown
    assert len(shown.splitlines()) < 20


def test_a_file_that_is_gone_still_gets_its_finding() -> None:
    shown = render(LintResult((fault(),)), "full", View(base="/p"))
    assert shown.startswith("model.py:7:13: CG101") and "Decoder.step" in shown and "help:" in shown


def test_concise_is_one_line_each() -> None:
    lines = render(whole(), "concise", view()).splitlines()
    assert lines[0].startswith("model.py:7:13: CG101 [*] host-sync: `x.max().item()` waits") and len(lines) == 2


def test_colours_only_when_asked_for() -> None:
    plain = render(whole(), "full", view(engine=ENGINE, model=MODEL))
    loud = view(engine=ENGINE, model=MODEL)
    loud.colour = True
    coloured = render(whole(), "full", loud)
    assert "\x1b[" in coloured and "\x1b[" not in plain
    import click

    assert click.unstyle(coloured) == plain


def carets(line: str, at: Place) -> list[str]:
    return [row for row in frame(at, view(a=line)) if not row.endswith("|")]


@pytest.mark.parametrize(
    ("line", "start", "end", "under"),
    [
        ("\tx = y.item()", 6, 14, "        ^^^^^^^^"),  # a tab is four blanks wide
        ("s = '日本' + y.item()", 12, 20, "             ^^^^^^^^"),  # wide characters take two columns
        ("x = 'e\u0301' + y.item()", 12, 20, "          ^^^^^^^^"),  # a combining accent takes none
        ("x", 1, 1, "^"),
        ("x", 90, 99, " ^"),  # behind the end: the file has changed since
    ],
)
def test_carets_stand_under_the_fault(line: str, start: int, end: int, under: str) -> None:
    shown = carets(line, Place("a.py", 1, start, 1, end))
    assert shown[-1] == f"  | {under}"


def test_control_characters_do_not_reach_the_terminal() -> None:
    assert carets("x = '\x1b[31m\x07'", Place("a.py", 1, 1, 1, 2))[0] == "1 | x = '\\x1b[31m\\x07'"


def test_a_very_long_line_is_clipped_around_the_fault() -> None:
    line = "a = [" + "1, " * 5000 + "y.item()]"
    shown = carets(line, Place("a.py", 1, 15006, 1, 15014))
    assert max(map(len, shown)) < 160
    start = shown[1].index("^")
    assert shown[0][start : start + 8] == "y.item()"


def test_a_fault_of_many_lines_is_cut() -> None:
    lines = "f(\n" + "    x,\n" * 50 + ")\n"
    shown = frame(Place("a.py", 1, 1, 52, 2), view(a=lines), "crash")
    assert len(shown) < 12 and shown[-2].endswith("^^ crash")


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (LintResult(()), ""),
        (LintResult((), files=3), "No capture region in 3 files: nothing to check.\n"),
        (LintResult((), files=1, regions=whole().regions), "All checks passed: 1 capture region in 1 file.\n"),
        (
            whole(),
            "Found 2 problems (1 crash, 1 note); 1 capture region in 2 files.\n[*] 1 can be mended with `--fix`.\n"
            "1 call in capture regions could not be resolved; `--verbose` lists them.\n",
        ),
    ],
)
def test_summary_says_what_nothing_means(result: LintResult, words: str) -> None:
    assert text.summary(result) == words


def test_statistics_count_by_rule() -> None:
    result = LintResult((fault(), *whole().findings))
    assert text.statistics(result, view()) == "2  CG101  crash   host-sync\n1  CG205  note    dropout-in-region\n"


@pytest.mark.parametrize("output_format", FORMATS)
def test_every_format_takes_everything_and_nothing(output_format: str) -> None:
    odd = finding("o dd,%:.py", 1, message="a\nb ]]> <&\"' \x1b %", help="")
    for result in (LintResult(()), whole(), LintResult((odd,))):
        shown = render(result, output_format, view(engine=ENGINE, model=MODEL))
        if output_format in ("json", "sarif", "gitlab"):
            json.loads(shown)
        if output_format == "junit":
            ElementTree.fromstring(shown)


def test_json_is_a_superset_of_ruffs() -> None:
    first, second = json.loads(render(whole(), "json", view()))
    assert first == {
        "cell": None,
        "code": "CG101",
        "name": "host-sync",
        "family": "host-sync",
        "severity": "crash",
        "message": "`x.max().item()` waits for the GPU and brings one value to the host",
        "help": "stay on the device: `scale = x.max()`",
        "filename": "model.py",
        "location": {"row": 7, "column": 13},
        "end_location": {"row": 7, "column": 27},
        "region": {"filename": "engine.py", "row": 6, "kind": "graph"},
        "trace": [
            {"filename": "engine.py", "row": 7, "name": "Decoder.step"},
            {"filename": "model.py", "row": 3, "name": "normalise"},
        ],
        "related": [{"filename": "engine.py", "row": 7, "message": "`x` is on the GPU"}],
        "fix": {
            "message": "drop the read",
            "applicability": "safe",
            "edits": [
                {
                    "filename": "model.py",
                    "content": "",
                    "location": {"row": 7, "column": 20},
                    "end_location": {"row": 7, "column": 27},
                }
            ],
        },
        "noqa_row": 7,
        "url": "rules/host-sync.md",
    }
    assert second["region"] is None and second["trace"] == [] and second["fix"] is None
    lines = render(whole(), "json-lines", view()).splitlines()
    assert [json.loads(line) for line in lines] == [first, second]


def test_github_annotations() -> None:
    lines = render(whole(), "github", view()).splitlines()
    assert lines[0].startswith(
        "::error title=graphlint (CG101),file=model.py,line=7,col=13,endLine=7,endColumn=27::model.py:7:13: CG101"
    )
    assert "%0A  reached from the capture at engine.py:6%0A  help:" in lines[0]
    assert lines[1].startswith("::notice title=graphlint (CG205)")
    assert lines[2] == "::error title=graphlint,file=bad.py,line=3::is no valid Python: invalid syntax"


def test_sarif_is_valid_by_the_official_schema() -> None:
    for result in (LintResult(()), whole()):
        log = json.loads(render(result, "sarif", view(engine=ENGINE, model=MODEL)))
        jsonschema.Draft4Validator(SCHEMA, format_checker=jsonschema.FormatChecker()).validate(log)


def test_the_schema_would_refuse_a_wrong_log() -> None:
    log = json.loads(render(whole(), "sarif", view()))
    log["runs"][0]["results"][0]["level"] = "crash"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft4Validator(SCHEMA).validate(log)


def test_sarif_carries_the_way_the_suppression_and_relative_uris() -> None:
    run = json.loads(render(whole(), "sarif", View(base=str(Path.cwd()))))["runs"][0]
    first, note, silenced = run["results"]
    way = first["codeFlows"][0]["threadFlows"][0]["locations"]
    places = [step["location"]["physicalLocation"] for step in way]
    assert [(place["artifactLocation"]["uri"], place["region"]["startLine"]) for place in places] == [
        ("engine.py", 6),
        ("engine.py", 7),
        ("model.py", 3),
        ("model.py", 7),
    ]
    assert run["columnKind"] == "unicodeCodePoints" and "codeFlows" not in note
    assert silenced["suppressions"][0]["justification"] == "meant" and "suppressions" not in first
    assert run["invocations"][0]["executionSuccessful"] is False
    assert len(run["invocations"][0]["toolExecutionNotifications"]) == 2
    page = run["tool"]["driver"]["rules"][0]["help"]["markdown"]
    assert page.startswith("# host-sync") and "```toml" not in page


def test_fingerprints_survive_moved_lines_and_tell_equal_ones_apart() -> None:
    twice = (
        "class A:\n    def f(self, x):\n        x.item()\n        x.item()\n\n    def g(self, x):\n        x.item()\n"
    )
    first = fingerprints([finding("a.py", row) for row in (3, 4, 7)], view(a=twice))
    assert len(set(first)) == 3
    moved = fingerprints([finding("a.py", row) for row in (5, 6, 9)], view(a="import torch\n\n" + twice))
    assert moved == first
    changed = fingerprints([finding("a.py", 3)], view(a=twice.replace("x.item()", "y.item()", 1)))
    assert changed[0] not in first


def test_scope_is_told_by_indentation() -> None:
    source = "class A:\n    def f(self):\n        def inner():\n            pass\n        x = 1\n\nasync def g():\n\ty = 1\nz = 1\n"
    names = [view(a=source).scope("a.py", row) for row in (4, 5, 8, 9)]
    assert names == ["A.f.inner", "A.f", "g", ""]
