"""Runs fixtures through the dry run, each in a forked process of its own: a program may leave streams, process groups and patches behind.

What the programs need is loaded once, before the first fork: loading torch's compiler takes a second, running a fixture a tenth of one.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fixture_marks

TARGET = "2.11"  # the release on which the fixtures' outcomes were recorded
LIMIT_S = 120


@dataclass(frozen=True)
class Judged:
    """What the dry run said of one program: `findings` as `(file, row, rule)`, what it printed, and what stopped it."""

    findings: tuple[tuple[str, int, str], ...]
    output: str = ""
    error: str = ""

    def verdict(self, fixture: fixture_marks.Fixture) -> str:
        """`exact` rule and line, `line` alone, `rule` alone elsewhere, `other`, `missed`; for ok programs `clean` or `false`."""
        if fixture.outcome == "ok":
            return "false" if self.findings else "clean"
        marks = {(mark.file, mark.row): mark.rules for mark in fixture.marks}
        rules = {rule for mark in fixture.marks for rule in mark.rules}
        on_line = [finding for finding in self.findings if (Path(finding[0]).name, finding[1]) in marks]
        if any(finding[2] in marks[Path(finding[0]).name, finding[1]] for finding in on_line):
            return "exact"
        if on_line:
            return "line"
        if any(finding[2] in rules for finding in self.findings):
            return "rule"
        return "other" if self.findings else "missed"


def judge(path: Path) -> Judged:
    """The dry run of a whole program."""
    return Judging([path]).judged(path)


class Judging:
    """Dry runs of many programs, in the order given and as many at a time as there are cores; a result is asked for by its path."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._waiting = list(reversed(paths))
        self._begun: dict[Path, tuple[int, int]] = {}

    def judged(self, path: Path) -> Judged:
        """What the dry run said of this program; the next ones go on meanwhile."""
        _preload()
        while path not in self._begun or (self._waiting and len(self._begun) < (os.cpu_count() or 1)):
            following = self._waiting.pop()
            self._begun[following] = _forked(functools.partial(_run, following))
        return _answer(*self._begun.pop(path))


@functools.cache
def _preload() -> None:
    from graphlint import rulebook

    for module in ("torch._dynamo", "torch.distributed.fsdp", "graphlint.runtime.dryrun.script"):
        importlib.import_module(module)
    rulebook.load()
    gc.collect()


def _run(path: Path) -> dict[str, Any]:
    import warnings

    import torch

    from graphlint.runtime.dryrun import dry_run_script

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    report = dry_run_script(path, target_torch=TARGET)
    found = [(f.at.filename, f.at.row, f.name) for f in report.faults]
    return {"findings": found, "output": report.output, "error": report.error}


def _forked(work: Callable[[], dict[str, Any]]) -> tuple[int, int]:
    """Begins a child; returns its process and the pipe that its answer comes through."""
    read, write = os.pipe()
    leave = os._exit
    gc.freeze()  # what is there is shared with the child, and out of its collector's way
    child = os.fork()
    if child:
        gc.unfreeze()
    if child == 0:
        signal.alarm(LIMIT_S)
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, 1)
        os.dup2(devnull, 2)
        try:
            answer = work()
        except BaseException as error:
            answer = {"findings": [], "output": "", "error": f"{type(error).__name__}: {error}"}
        with os.fdopen(write, "w") as pipe:
            json.dump(answer, pipe)
        leave(0)
    os.close(write)
    return child, read


def _answer(child: int, read: int) -> Judged:
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    if not text:
        return Judged((), error="the program did not end")
    answer = json.loads(text)
    return Judged(tuple((f[0], f[1], f[2]) for f in answer["findings"]), answer["output"], answer["error"])
