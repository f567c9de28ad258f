"""A failed capture tells one error, and CUDA's words for it. The dry run of the same call tells the operator, the rule,
and everything else that would have failed next.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from graphlint.findings import Finding, Place
from graphlint.runtime.errors import CaptureError, error_of

# what the text of an error can't tell apart, or only by the look of the line
_VAGUE = frozenset(
    {
        "host-sync",
        "host-copy",
        "host-index",
        "scalar-index",
        "dynamic-shape",
        "data-dependent-branch",
        "data-dependent-loop",
        "printed-tensor",
        "checked-linalg",
        "hidden-check",
        "stream-sync",
        "blocking-collective",
        "unforked-stream",
        "unknown-capture-failure",
    }
)


def explained(
    error: CaptureError,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    generators: list[torch.Generator],
    emulated: bool,
) -> CaptureError:
    """The error with the rule that a dry run of the call finds at its line, and with the other crashes of the call.

    Runs the call once more, eagerly; the caller puts its effects back. Gives the error as it is where nothing can be
    added: for one that the dry run does not explain, inside another dry run, and where other ranks would wait for this
    one's collectives.
    """
    if error.cause is None or _others_wait():
        return error
    from graphlint.runtime.dryrun import emulate

    if emulate.current() is not None:
        return error
    found = _crashes(fn, args, kwargs, generators, emulated)
    here = [finding for finding in found if _at(finding, error)]
    best = next((f for f in here if f.name == error.rule), here[0] if here else None)
    told = error
    if best is not None and error.rule in _VAGUE:
        inside = "" if _same(best.at.filename, best.at.row, best.at.end_row, error) else f", in {_short(best.at)}"
        told = error_of(best.name)(
            best.message + inside,
            rule=best.name,
            stage=error.stage,
            where=error.where,
            forward=error.forward,
            cure=best.help,
            cause=error.cause,
        )
        told.__cause__ = error.__cause__
    others = [f"{f.at.filename}:{f.at.row} {f.code} {f.name}: {f.message}" for f in found if f not in here]
    return told.beside(others)


def _others_wait() -> bool:
    return bool(torch.distributed.is_available() and torch.distributed.is_initialized())


def _crashes(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    generators: list[torch.Generator],
    emulated: bool,
) -> list[Finding]:
    """What breaks the capture of the call, by its dry run."""
    from graphlint import rulebook
    from graphlint.runtime.dryrun import emulate
    from graphlint.runtime.dryrun.judge import Judge
    from graphlint.runtime.dryrun.run import StepRun
    from graphlint.runtime.dryrun.session import Session

    session = Session(emulated=emulated, assume_device=True)
    with emulate.emulated_device(session):
        run = StepRun(session, Judge(rulebook.parse_version(torch.__version__)), fn, args, kwargs, tuple(generators))
        report = run.report(None, runs=1, warmup=0, ignore=frozenset())
    return [finding for finding in report.findings if finding.severity == "crash"]


def _at(finding: Finding, error: CaptureError) -> bool:
    """Whether a finding is about the line of the error: it lies there, or in a library that the line leads to."""
    at = finding.at
    places = [(at.filename, at.row, at.end_row), *((s.filename, s.row, s.row) for s in finding.trace)]
    return any(_same(*place, error) for place in places)


def _same(filename: str, row: int, end_row: int, error: CaptureError) -> bool:
    same = Path(filename).resolve() == Path(error.filename).resolve() if error.filename else False
    return same and row <= error.lineno <= (end_row or row)


def _short(at: Place) -> str:
    """A place in a library: the last two parts of its path, and the row."""
    return f"{'/'.join(Path(at.filename).parts[-2:])}:{at.row}"
