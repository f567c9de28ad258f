"""The dry run of a whole program: a script is run as `__main__` on a played device, with everything it captures and
replays."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from graphlint import rulebook
from graphlint.runtime.dryrun import emulate
from graphlint.runtime.dryrun.judge import Judge
from graphlint.runtime.dryrun.program import Program
from graphlint.runtime.dryrun.report import DryRunReport, executed_lines
from graphlint.runtime.dryrun.session import Session


def dry_run_script(path: str | Path, arguments: Sequence[str] = (), target_torch: str | None = None) -> DryRunReport:
    """Runs a Python file as `__main__` with the CPU playing the device, whatever the machine has; its output is in
    the report.

    Captures record, replays run what was recorded on the memory of the capture, and each replay is compared with an
    eager run of its region. Raises nothing for what the program raises: the report's `error` tells it. Raises OSError
    when the file can't be read.
    """
    path = Path(path)
    path.read_bytes()
    before = sys.argv
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.resolve().parent))
    try:
        return dry_run_program(lambda: runpy.run_path(str(path), run_name="__main__"), target_torch)
    finally:
        sys.argv = before
        sys.path.remove(str(path.resolve().parent))


def dry_run_program(main: Callable[[], Any], target_torch: str | None = None) -> DryRunReport:
    """Like `dry_run_script`, for a function that does everything: builds, captures, replays."""
    session, error, printed = Session(emulated=True), "", io.StringIO()
    session.stop = dry_run_program.__code__  # what is above is no code of the program
    program = Program(session, Judge(rulebook.parse_version(target_torch or torch.__version__)))
    with emulate.emulated_device(session):
        try:
            with contextlib.redirect_stdout(printed), program.running():
                main()
        except SystemExit as leaving:
            error = f"SystemExit: {leaving.code}" if leaving.code not in (None, 0) else ""
        except Exception as raised:
            first = str(raised).strip().splitlines()
            error = f"{type(raised).__name__}: {first[0] if first else ''}"
        findings = program.verdicts()
    traces = [region.trace for region in session.regions]
    return DryRunReport(
        findings=tuple(sorted(findings, key=lambda f: (f.at, f.code))),
        copies=tuple(copy for trace in traces for copy in trace.copies),
        draws=tuple(draw for trace in traces for draw in trace.draws),
        executed=executed_lines(*traces),
        runs=program.compared,
        regions=len(traces),
        operators=sum(len(trace.ops) for trace in traces),
        device="the CPU playing a CUDA device",
        torch=str(torch.__version__),
        error=error,
        output=printed.getvalue(),
    )
