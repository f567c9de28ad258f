"""The command as people use it: arguments, exit codes, what goes to which stream."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from kit import command, finding, project, small_engine

from graphlint import cli, pipeline
from graphlint.config import Config
from graphlint.files import Sources
from graphlint.findings import Edit, Finding, Fix, LintResult, Place, Problem

CAPTURE = "with graph:  # region\n    helper(x)\n"
FAULT = "def helper(x):\n    return x.item()\n"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """Runs the command in this process on the small engine, in a fresh folder."""
    monkeypatch.setattr(pipeline, "analyse", small_engine)
    monkeypatch.chdir(tmp_path)
    for name in ("GRAPHLINT_CACHE_DIR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)

    def invoke(*args: str, stdin: str = "") -> Result:
        done = CliRunner().invoke(_program, args, input=stdin, prog_name="graphlint")
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        return done

    return invoke


class _Program(click.Command):
    """`cli.main` with its own handling of errors, as the installed script calls it."""

    def main(self, args: list[str] | None = None, **_: object) -> None:  # type: ignore[override]
        cli.main(args)


_program = _Program("graphlint")


def test_a_fault_is_found_across_files(run: Any, tmp_path: Path) -> None:
    project(tmp_path, {"a.py": CAPTURE, "b.py": FAULT})
    done = run(".")
    assert done.exit_code == 1
    assert done.stdout.startswith("b.py:2:13: CG101 host-sync: ") and "a.py:2" in done.stdout
    assert "Found 1 problem (1 crash); 1 capture region in 2 files." in done.stdout
    assert done.stderr == ""


def test_no_path_means_here_and_check_may_be_said(run: Any, tmp_path: Path) -> None:
    project(tmp_path, {"a.py": FAULT})
    assert run().exit_code == run("check").exit_code == run("check", ".").exit_code == run("a.py").exit_code == 1


def test_a_path_named_like_a_command_can_be_reached(run: Any, tmp_path: Path) -> None:
    project(tmp_path, {"rules/a.py": FAULT})
    assert run("./rules").exit_code == 1
    assert "CG101" in run("rules").stdout and run("rules").exit_code == 0


def test_clean_is_0_and_says_so(run: Any, tmp_path: Path) -> None:
    project(tmp_path, {"a.py": CAPTURE})
    done = run()
    assert (done.exit_code, done.stdout) == (0, "All checks passed: 1 capture region in 1 file.\n")
    assert run("--quiet").stdout == ""


def test_notes_are_shown_but_do_not_fail(run: Any, tmp_path: Path) -> None:
    project(tmp_path, {"a.py": "x = 1  # graphlint: ignore[host-sync]\n"})
    done = run()
    assert done.exit_code == 0 and "CG900" in done.stdout and "1 note" in done.stdout


def test_exit_zero_forgives_findings_but_not_failures(run: Any, tmp_path: Path) -> None:
    project(tmp_path, {"a.py": FAULT})
    assert run("--exit-zero").exit_code == 0
    assert run("--exit-zero", ".", "gone.py").exit_code == 2


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["--select", "CG2"], 0),
        (["--select", "CG2,CG101"], 1),
        (["--select", "CG2", "--select", "host-sync"], 1),
        (["--select", "rng", "--extend-select", "crash"], 1),
        (["--ignore", "host-sync"], 0),
        (["--ignore", "CG1", "--select", "CG101"], 1),
        (["--per-file-ignores", "a.py:CG101"], 0),
        (["--per-file-ignores", "b.py:CG101,c.py:ALL"], 1),
        (["--config", 'select = ["silent"]'], 0),
        (["--config", "other.toml"], 0),
        (["--config", "other.toml", "--config", 'ignore = ["CG2"]'], 1),
        (["--isolated"], 1),
        (["--exclude", "a.py", "."], 0),
        (["--exclude", "a.py", "a.py"], 1),
        (["--exclude", "a.py", "--force-exclude", "a.py"], 0),
    ],
)
def test_options_choose_rules_and_files(run: Any, tmp_path: Path, args: list[str], code: int) -> None:
    project(tmp_path, {"a.py": FAULT, "other.toml": 'ignore = ["CG1"]'})
    assert run(*args).exit_code == code


def test_configuration_is_found_and_the_command_line_wins(run: Any, tmp_path: Path) -> None:
    project(
        tmp_path,
        {"pyproject.toml": '[tool.graphlint]\nselect = ["rng"]\noutput-format = "concise"\n', "src/a.py": FAULT},
    )
    assert run("src").exit_code == 0
    done = run("src", "--select", "ALL")
    assert done.exit_code == 1 and len(done.stdout.splitlines()) == 2


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--select", "hots-sync"], "did you mean `host-sync`?"),
        (["--ignore", "CG999"], "--ignore: `ignore` names no rule `CG999`"),
        (["--target-torch", "1.0"], "must be 2.6 or newer"),
        (["--output-format", "xml"], "is not one of"),
        (["--config", "gone.toml"], "can't be read: no such file"),
        (["--config", "selct = 1"], "unknown key `selct`"),
        (["--per-file-ignores", "a.py"], "write PATTERN:CODE"),
        (["--no-such-option"], "No such option"),
        (["explain", "hots-sync"], "did you mean `host-sync`?"),
        (["-", "a.py"], "standard input is linted alone"),
    ],
)
def test_mistakes_are_one_clear_line_and_2(run: Any, tmp_path: Path, args: list[str], words: str) -> None:
    project(tmp_path, {"a.py": FAULT})
    done = run(*args)
    assert done.exit_code == 2 and words in done.stderr and done.stdout == ""
    assert "Traceback" not in done.stderr


def test_a_mistake_in_the_configuration_names_file_and_line(run: Any, tmp_path: Path) -> None:
    project(tmp_path, {"graphlint.toml": "\nselct = []\n", "a.py": ""})
    done = run()
    assert done.exit_code == 2 and f"{tmp_path}/graphlint.toml:2: unknown key `selct`" in done.stderr


def test_statistics(run: Any, tmp_path: Path) -> None:
    project(tmp_path, {"a.py": "x.item()\ny.item()\n"})
    assert run("--statistics", "--quiet").stdout == "2  CG101  crash   host-sync\n"
    rows = json.loads(run("--statistics", "--output-format", "json").stdout)
    assert rows == [{"code": "CG101", "name": "host-sync", "severity": "crash", "count": 2}]


def test_json_is_all_there_is_on_stdout(run: Any, tmp_path: Path) -> None:
    project(tmp_path, {"a.py": FAULT, "b.py": "def f(:\n"})
    done = run("--output-format", "json")
    assert [row["code"] for row in json.loads(done.stdout)] == ["CG101"]
    assert done.exit_code == 2 and "b.py:1: error: syntax error" in done.stderr


def test_output_file(run: Any, tmp_path: Path) -> None:
    project(tmp_path, {"a.py": FAULT})
    done = run("--output-format", "sarif", "-o", "out/report.sarif")
    assert done.exit_code == 1 and done.stdout == ""
    assert json.loads((tmp_path / "out/report.sarif").read_text())["version"] == "2.1.0"
    done = run("-o", "a.py/report.txt")
    assert done.exit_code == 2 and "the report can't be written" in done.stderr


def test_standard_input(run: Any, tmp_path: Path) -> None:
    project(tmp_path, {"pkg/__init__.py": "", "pkg/a.py": "old = 1\n", "pkg/b.py": FAULT})
    done = run("--stdin-filename", "pkg/a.py", stdin="x.item()\n")
    assert done.exit_code == 1 and done.stdout.startswith("pkg/a.py:1:2: CG101") and "1 | x.item()" in done.stdout
    assert run("-", stdin="y = 1\n").exit_code == 0
    assert run("-", stdin="x.item()\n").stdout.startswith("stdin.py:1:2: CG101")
    assert (tmp_path / "pkg/a.py").read_text() == "old = 1\n"


def test_show_files(run: Any, tmp_path: Path) -> None:
    project(tmp_path, {"b.py": "", "a/c.py": "", ".venv/d.py": ""})
    assert run("--show-files").stdout == "a/c.py\nb.py\n"


def test_verbose_lists_what_stayed_unresolved(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project(tmp_path, {"a.py": CAPTURE})
    open_end = Problem("a.py", 2, "`self.hook` is not known")
    monkeypatch.setattr(pipeline, "analyse", lambda sources, settings: LintResult((), unresolved=(open_end,)))
    assert "a.py:2: unresolved: `self.hook` is not known" in run("--verbose").stderr
    quiet = run()
    assert "unresolved" not in quiet.stderr and "1 call in capture regions could not be resolved" in quiet.stdout


def test_one_finding_for_a_fault_that_two_regions_reach(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from graphlint.findings import RegionRef, Step

    near = finding("a.py", 2, region=RegionRef("a.py", 1, "graph"))
    far = finding("a.py", 2, region=RegionRef("b.py", 9, "graph"), trace=(Step("b.py", 10, "helper"),))
    monkeypatch.setattr(pipeline, "analyse", lambda sources, settings: LintResult((far, near)))
    project(tmp_path, {"a.py": FAULT})
    (row,) = json.loads(run("--output-format", "json").stdout)
    assert row["region"]["filename"] == "a.py"
    assert row["related"] == [{"filename": "b.py", "row": 9, "message": "another capture reaches it too"}]


def test_only_what_concerns_the_named_files_is_reported(run: Any, tmp_path: Path) -> None:
    project(tmp_path, {"pyproject.toml": "", "a.py": CAPTURE, "b.py": FAULT, "c.py": "z.item()\n"})
    assert [row["filename"] for row in json.loads(run("b.py", "--output-format", "json").stdout)] == ["b.py"]
    # the capture is in a.py: what it reaches has its cause there
    assert [row["filename"] for row in json.loads(run("a.py", "--output-format", "json").stdout)] == ["b.py", "c.py"]


def test_a_broken_file_elsewhere_is_not_this_runs_failure(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def engine(sources: Sources, settings: Config) -> LintResult:
        return LintResult((), problems=(Problem("b.py", 1, "syntax error: invalid syntax"),))

    monkeypatch.setattr(pipeline, "analyse", engine)
    project(tmp_path, {"pyproject.toml": "", "a.py": "x = 1  # noqa: CG101\n", "b.py": "def f(:\n"})
    alone = run("a.py", "--verbose")
    assert alone.exit_code == 0 and "b.py:1: unresolved: syntax error" in alone.stderr
    assert "CG900" not in alone.stdout  # what `b.py` would have shown nobody knows
    assert run("a.py", "b.py").exit_code == 2


# --- fixes -----------------------------------------------------------------------------------------------------------


def mending(sources: Sources, settings: Config) -> LintResult:
    """An engine whose findings can be fixed: `.item()` safely, `.cpu()` not."""
    found: list[Finding] = []
    for source in sources:
        for row, line in enumerate(source.lines(), 1):
            for text, safe in ((".item()", True), (".cpu()", False)):
                if text in line:
                    start = line.index(text) + 1
                    at = Place(source.path, row, start, row, start + len(text))
                    found.append(
                        finding(source.path, row, start, start + len(text), fix=Fix("drop", (Edit(at, ""),), safe=safe))
                    )
    return LintResult(tuple(found))


def test_fix_writes_and_diff_does_not(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "analyse", mending)
    text = "# coding: latin-1\r\nx = y.item() + '\xe4'\r\nz = x.cpu()\r\n".encode("latin-1")
    project(tmp_path, {"a.py": text, "b.py": "k = 1"})
    os.chmod(tmp_path / "a.py", 0o751)
    done = run("--diff")
    assert done.exit_code == 1 and "-x = y.item() + 'ä'\n+x = y + 'ä'\n" in done.stdout
    assert (tmp_path / "a.py").read_bytes() == text
    done = run("--fix")
    assert done.exit_code == 1 and "Mended 1 in 1 files." in done.stderr  # `.cpu()` is left
    assert (tmp_path / "a.py").read_bytes() == text.replace(b".item()", b"")
    assert (tmp_path / "a.py").stat().st_mode & 0o777 == 0o751
    assert run("--fix", "--unsafe-fixes").exit_code == 0
    assert (tmp_path / "a.py").read_bytes() == text.replace(b".item()", b"").replace(b".cpu()", b"")
    assert run("--diff").exit_code == 0 and sorted(os.listdir(tmp_path)) == [".graphlint_cache", "a.py", "b.py"]


def test_a_fix_that_breaks_the_file_is_not_written(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaking(sources: Sources, settings: Config) -> LintResult:
        return LintResult((finding("a.py", 1, fix=Fix("break", (Edit(Place("a.py", 1, 1, 1, 2), "("),), safe=True)),))

    monkeypatch.setattr(pipeline, "analyse", breaking)
    project(tmp_path, {"a.py": "x = 1\n"})
    assert run("--fix").exit_code == 1 and (tmp_path / "a.py").read_text() == "x = 1\n"


def test_overlapping_fixes_are_applied_one_at_a_time(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def both(sources: Sources, settings: Config) -> LintResult:
        edits = [Edit(Place("a.py", 1, 1, 1, 2), "y"), Edit(Place("a.py", 1, 1, 1, 6), "z = 2")]
        return LintResult(
            tuple(finding("a.py", 1, number + 1, fix=Fix("", (edit,), safe=True)) for number, edit in enumerate(edits))
        )

    monkeypatch.setattr(pipeline, "analyse", both)
    project(tmp_path, {"a.py": "x = 1\n"})
    run("--fix")
    assert (tmp_path / "a.py").read_text() == "y = 1\n"


def test_unused_suppressions_can_be_removed(run: Any, tmp_path: Path) -> None:
    project(tmp_path, {"a.py": "x = 1  # graphlint: ignore[host-sync] -- no more\n"})
    assert run("--fix").exit_code == 0
    assert (tmp_path / "a.py").read_text() == "x = 1\n"


# --- other commands --------------------------------------------------------------------------------------------------


def test_regions(run: Any, tmp_path: Path) -> None:
    project(tmp_path, {"a.py": CAPTURE, "b.py": "with graph:  # unresolved\n    pass\n"})
    assert json.loads(run("regions", "--output-format", "json", ".").stdout)[0] == {
        "filename": "a.py",
        "row": 1,
        "end_row": 2,
        "kind": "graph",
        "api": "torch.cuda.graph",
        "captured": "a block",
        "resolved": True,
    }
    assert run("regions").stdout.splitlines() == [
        "a.py:1-2: graph torch.cuda.graph: a block",
        "b.py:1-2: graph torch.cuda.graph: a block  (not all of it was resolved)",
        "2 capture regions in 2 files; 1 of them resolved whole.",
    ]
    assert run("regions", "gone").exit_code == 2


def test_rules_and_explain(run: Any) -> None:
    rows = json.loads(run("rules", "--output-format", "json").stdout)
    assert {"code", "name", "family", "severity", "explanation"} <= set(rows[0])
    assert "CG101  crash   host-sync" in run("rules").stdout
    assert "CG101" not in run("rules", "--family", "rng").stdout
    for name in ("CG101", "host-sync", "cg101"):
        done = run("explain", name)
        assert done.exit_code == 0 and done.stdout.startswith("# host-sync\n") and "## Why is this bad?" in done.stdout


def test_every_rule_can_be_explained(run: Any) -> None:
    for row in json.loads(run("rules", "--output-format", "json").stdout):
        assert run("explain", row["code"]).exit_code == 0


def test_help_lists_every_command_without_importing_it() -> None:
    text = "import sys, graphlint.cli as c\ntry: c.main(['--help'])\nexcept SystemExit: pass\nprint([m for m in sys.modules if m.startswith('graphlint.runtime') or m == 'torch'])"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert all(name in done.stdout for name in ("check", "rules", "explain", "regions", "dry-run", "profile", "parity"))
    assert done.stdout.endswith("[]\n")


def test_a_command_that_needs_torch_says_what_to_install(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cli._COMMANDS, "profile", ("kit_no_torch:command", ""))
    (Path.cwd() / "kit_no_torch.py").write_text("import torch\n")
    monkeypatch.syspath_prepend(str(Path.cwd()))
    monkeypatch.setitem(sys.modules, "torch", None)
    done = run("profile")
    assert done.exit_code == 2 and "cuda-graphlint[runtime]" in done.stderr


# --- the real process ------------------------------------------------------------------------------------------------


def test_version_and_module(tmp_path: Path) -> None:
    from graphlint import __version__

    assert command("--version", cwd=tmp_path).stdout == f"graphlint, version {__version__}\n"


def test_no_colour_and_no_progress_without_a_terminal(tmp_path: Path) -> None:
    project(tmp_path, {"a.py": "x = 1  # graphlint: ignore[host-sync]\n"})
    done = command(".", cwd=tmp_path)
    assert "\x1b" not in done.stdout + done.stderr and done.stderr == ""
    assert "\x1b[" in command(".", "--color", "always", cwd=tmp_path).stdout
    assert "\x1b[" in command(".", cwd=tmp_path, FORCE_COLOR="1").stdout


def test_ascii_terminal(tmp_path: Path) -> None:
    project(tmp_path, {"a.py": "x = 'äöü日本'  # graphlint: ignore[host-sync]\n"})
    done = command(".", cwd=tmp_path, PYTHONIOENCODING="ascii", LC_ALL="C")
    assert done.returncode == 0 and "\\xe4" in done.stdout and done.stderr == ""


def test_a_reader_that_stops_early(tmp_path: Path) -> None:
    project(tmp_path, {"a.py": "x = 1  # graphlint: ignore[host-sync]\n" * 2000})
    line = f"{sys.executable} -m graphlint a.py --output-format concise | head -1"
    done = subprocess.run(line, shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("a.py:1:") and "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


def test_an_error_of_ours_is_one_line(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(sources: Sources, settings: Config) -> LintResult:
        raise KeyError("oops\nmore")

    monkeypatch.setattr(pipeline, "analyse", broken)
    project(tmp_path, {"a.py": ""})
    done = run()
    assert (
        done.exit_code == 2
        and done.stderr.startswith("graphlint: internal error: KeyError")
        and len(done.stderr.splitlines()) == 1
    )


def test_watch_lints_again_after_a_change(tmp_path: Path) -> None:
    project(tmp_path, {"a.py": "x = 1\n"})
    log = tmp_path / "log.txt"
    with open(log, "w") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "graphlint", "a.py", "--watch", "--no-cache"],
            cwd=tmp_path,
            stdout=stream,
            stderr=stream,
        )
    try:
        assert _waited(log, "watching 1 files")
        (tmp_path / "a.py").write_text("x = 1  # graphlint: ignore[host-sync]\n")
        assert _waited(log, "CG900")
    finally:
        process.terminate()
        process.wait(10)


def _waited(log: Path, words: str) -> bool:
    for _ in range(100):
        if words in log.read_text():
            return True
        time.sleep(0.1)
    return False


def test_progress_is_shown_on_a_terminal_and_wiped() -> None:
    import io

    from graphlint import progress

    terminal = io.StringIO()
    with progress.Line(terminal) as line:
        line._next = 0
        assert list(progress.told("abc", "reading", 3)) == ["a", "b", "c"]
    assert terminal.getvalue() == "\r\x1b[Kreading 1/3\r\x1b[K"  # the next two come too soon to be read
    quick = io.StringIO()
    with progress.Line(quick):
        list(progress.told("abc", "reading", 3))
    assert quick.getvalue() == ""
    assert list(progress.told("abc", "reading", 3)) == ["a", "b", "c"]
