"""The engine on one screen: sources -> regions -> walks -> checks -> findings.

Walks begin at the programs' own entries: files that run something when run. Every region that no such walk captured is
walked from the function around
it, with made-up arguments. What no walk could resolve is listed, never taken for clean.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from graphlint import cache, checks, ir, progress, regions, rulebook, summary
from graphlint.checks.base import Report, Walk
from graphlint.config import Config
from graphlint.files import Source, Sources
from graphlint.findings import Finding, LintResult, Place, Problem, RegionInfo, RegionRef, Related, Step
from graphlint.flow import events as ev
from graphlint.flow.machine import Machine
from graphlint.link import Project, names_in
from graphlint.memo import Memo, Recorder
from graphlint.regions import Region

_ENTRY = ("__main__", "g.replay()", ".replay(")  # texts of files that do something when they are run
# files that hand themselves to a test runner, which the walk does not follow
_TEST_RUNNER = re.compile(r"\b(?:unittest\.main|absltest\.main|pytest\.main|run_tests)\s*\(")
MAX_ENTRIES = 400  # programs walked from their own entry; the rest is walked from its regions


class Reader:
    """Sources -> summaries, through the cache; what can't be read is a problem, once."""

    def __init__(self, sources: Sources, settings: Config) -> None:
        self.sources = sources
        self.store = cache.summary_store(settings)
        self.problems: dict[str, Problem] = {}
        self.known: dict[str, ir.Summary | None] = {}

    def summary(self, name: str, near: str) -> ir.Summary | None:
        """The module `name` as the file `near` would import it."""
        source = self.sources.by_module(name, self.sources.by_path(near))
        return None if source is None else self.of(source)

    def by_path(self, path: str) -> ir.Summary | None:
        source = self.sources.by_path(path)
        return None if source is None else self.of(source)

    def of(self, source: Source) -> ir.Summary | None:
        if source.path not in self.known:
            self.known[source.path] = self._read(source)
        return self.known[source.path]

    def _read(self, source: Source) -> ir.Summary | None:
        if source.check():
            return None
        key = source.digest + summary.SCHEMA.to_bytes(2, "big")
        stored = self.store.get(key)
        if stored is not None:
            try:
                found = summary.decode(stored)
                return msgspec.structs.replace(found, path=source.path, module=source.module)
            except msgspec.MsgspecError:
                pass  # a foreign or older entry: read anew
        try:
            made = summary.read(source.path, source.module, source.text)
        except summary.SourceError as error:
            self.problems[source.path] = Problem(source.path, error.row, str(error))
            return None
        self.store.put(key, summary.encode(made))
        return made


def analyse(sources: Sources, settings: Config) -> LintResult:
    """Raw findings (not yet selected, suppressed or sorted), regions, and what stayed unresolved."""
    reader = Reader(sources, settings)
    project = Project(reader)
    found = find_regions(sources, reader, project, settings)
    lint = _Lint(sources, reader, settings, found)
    near = _near(sources, found)
    wanted = [region for region in found if region.path in near]
    entries = _entries(sources, reader, wanted)
    for source in sources:
        if source.path not in reader.known:
            source.release()  # most files hold no region, and nothing that one reaches
    for path in progress.told(entries, "walking programs", len(entries)):
        lint.walk_entry(path)
    for region in progress.told(wanted, "walking regions", len(wanted)):
        if not lint.covered(region):
            lint.walk_region(region)
    return LintResult(
        findings=tuple(lint.findings.values()),
        problems=tuple(reader.problems.values()),
        regions=tuple(lint.info(region) for region in found),
        unresolved=tuple(lint.unresolved.values()),
    )


def find_regions(sources: Sources, reader: Reader, project: Project, settings: Config) -> list[Region]:
    """Every capture region of the project."""
    texts = ((source.path, source.text) for source in sources if not source.check())
    return regions.find_all(texts, reader.by_path, project, settings.regions)


def _near(sources: Sources, found: Iterable[Region]) -> set[str]:
    """The files with regions that are linted, or may reach what is: their text, or that of a file they mention, names a
    linted module."""
    near = {region.path for region in found if sources.is_linted(region.path)}
    others = {region.path for region in found} - near
    if not others:
        return near
    stems = {source.module.rpartition(".")[2] for source in sources.linted if source.module} - {
        "__init__",
        "main",
        "utils",
    }
    if len(stems) > 200:
        return near | others
    bridges = (
        {source.module.rpartition(".")[2] for source in sources.context if any(stem in source.text for stem in stems)}
        if len(sources.context) < 4000
        else set()
    )
    for path in others:
        source = sources.by_path(path)
        if source is not None and any(
            re.search(rf"import.*\b{re.escape(stem)}\b|\b{re.escape(stem)} import", source.text)
            for stem in stems | bridges
        ):
            near.add(path)
    return near


def _entries(sources: Sources, reader: Reader, found: Iterable[Region]) -> list[str]:
    """Files to walk from the top: they hold a region, or import a module that holds one, and run something."""
    holding = {region.path for region in found}
    imports = _importing({region.module for region in found})
    entries = []
    for source in sources:
        if source.path in holding:
            if any(mark in source.text for mark in _ENTRY) or _runs(reader.by_path(source.path)):
                entries.append(source.path)
        elif imports is not None and "__main__" in source.text and imports.search(source.text):
            if not _TEST_RUNNER.search(source.text):
                entries.append(source.path)
    return entries[:MAX_ENTRIES]


def _importing(modules: set[str]) -> re.Pattern[str] | None:
    """What an import of one of these modules looks like: `a.b.c` by its last two names, `.c` beside it, `c` alone."""
    ways = []
    for module in sorted(modules - {"", "__main__"}):
        package, _, name = module.rpartition(".")
        last, name = re.escape(package.rpartition(".")[2]), re.escape(name)
        if last:
            ways.append(rf"(?:from|import)\s+[\w.]*\b{last}\.{name}\b")
            ways.append(rf"from\s+[\w.]*\b{last}\s+import\b.*\b{name}\b")
        ways.append(rf"(?:from\s+\.*|import\s+){name}\b")
    return re.compile(rf"^\s*(?:{'|'.join(ways)})", re.M) if ways else None


def _runs(text: ir.Summary | None) -> bool:
    """Whether the top level of a file does something: it calls a function of its own, or loops."""
    if text is None:
        return False
    own = {stmt.func.name for stmt in text.body if isinstance(stmt, ir.Define)}
    for stmt in text.body:
        if isinstance(stmt, (ir.For, ir.While)):
            return True
        if (
            isinstance(stmt, (ir.Do, ir.Assign))
            and isinstance(stmt.value, ir.Call)
            and isinstance(stmt.value.func, ir.Name)
            and stmt.value.func.id in own
        ):
            return True
    return False


class _CameTo(msgspec.Struct, frozen=True):
    """What one walk came to: where it captured (file, row), what it could not resolve, what it found."""

    captures: tuple[tuple[str, int], ...] = ()
    unresolved: tuple[Problem, ...] = ()
    findings: tuple[Finding, ...] = ()


class _Lint:
    """Runs walks and collects what their checks report."""

    def __init__(self, sources: Sources, reader: Reader, settings: Config, found: Iterable[Region]) -> None:
        self.sources = sources
        self.reader = reader
        self.settings = settings
        self.regions: dict[tuple[str, ir.Span], Region] = {}
        for region in found:
            self.regions[
                region.path, region.call.at if region.callables and region.call is not None else region.stmt.at
            ] = region
        self.holding = {path for path, _ in self.regions}
        self.tried: set[tuple[str, str | None]] = set()
        self.book = rulebook.load()
        self.memo = Memo(sources, reader, settings)
        self.findings: dict[tuple[object, ...], Finding] = {}
        self.unresolved: dict[tuple[str, int], Problem] = {}
        self.walked: dict[tuple[str, int], bool] = {}  # region begun at -> resolved
        self.lines: dict[str, list[str]] = {}
        self.shared: dict[Any, Any] = {}  # what all walks need of the texts, worked out once

    # -- walks

    def walk_entry(self, path: str) -> None:
        self._try(path, 1, None)

    def walk_region(self, region: Region) -> None:
        self._try(region.path, region.row, region.function or None)  # no function: the file's own top level captures
        if not region.function:
            for function in self._callers(region):
                self._try(region.path, region.row, function)

    def _callers(self, region: Region) -> list[str]:
        """The functions of the file that mention what the region's statement binds: a callable that captures when it is
        called."""
        text = self.reader.by_path(region.path)
        if text is None:
            return []
        bound = {
            target.id
            for stmt in text.body
            if isinstance(stmt, ir.Assign) and stmt.at[0] <= region.row <= stmt.at[2]
            for target in stmt.targets
            if isinstance(target, ir.Name)
        }
        return [
            stmt.func.qualname
            for stmt in text.body
            if isinstance(stmt, ir.Define) and bound & set(names_in(stmt.func.body))
        ][:3]

    def _try(self, path: str, row: int, function: str | None) -> None:
        """One walk; an error of ours costs this walk, is said, and leaves the others."""
        try:
            self._walk(path, function)
        except Exception as error:
            if os.environ.get("GRAPHLINT_DEBUG"):
                raise
            what = f"{type(error).__name__}: {error}".splitlines()[0]
            why = f"could not be analysed: internal error, {what}; please report it (GRAPHLINT_DEBUG=1 shows where)"
            self.reader.problems.setdefault(path, Problem(path, row, why))

    def _walk(self, path: str, function: str | None) -> None:
        """One walk, or what it came to when everything that it read was the same."""
        if (path, function) in self.tried:
            return
        self.tried.add((path, function))
        piece = f"walk {function or ''}"
        came_to = self.memo.recall(piece, path, _CameTo)
        if came_to is None:
            recorder = Recorder(self.reader)
            came_to = self._walk_anew(path, function, recorder)
            self.memo.keep(piece, path, recorder, came_to)
        for file, row in came_to.captures:
            self.walked[file, row] = self.walked.get((file, row), True) and not came_to.unresolved
        for problem in came_to.unresolved:
            self.unresolved.setdefault((problem.filename, problem.row), problem)
        for finding in came_to.findings:
            self._keep(finding)

    def _walk_anew(self, path: str, function: str | None, reader: Recorder) -> _CameTo:
        project = Project(reader, self.shared)  # each walk has scopes of its own
        text = reader.by_path(path)
        if text is None:
            return _CameTo()
        module = project.add(text)
        machine = Machine(project, self.settings.target_torch, frozenset(self.settings.regions))
        machine.known_regions = self.regions
        if function is None:
            if path not in self.holding:  # it only imports what captures: most such files come to it soon, or never
                machine.budget //= 3
            machine.walk_main(module)
        else:
            machine.walk_function(module, function)
        came_to = _CameTo(
            tuple(
                dict.fromkeys(
                    # the calls on the way to a capture count too: of a wrapper that captures, the call is the region
                    (frame.module.path, span[0])
                    for capture in machine.captures
                    for frame, span in ((capture.frame, capture.at), *((one, at) for one, at, _ in capture.stack))
                )
            ),
            tuple(Problem(file, row, why) for (file, row), why in machine.unresolved.items()),
            tuple(self.finding(report) for report in checks.run(Walk(machine))),
        )
        machine.forget()
        return came_to

    def covered(self, region: Region) -> bool:
        return any((region.path, row) in self.walked for row in range(region.row, region.end_row + 1))

    def info(self, region: Region) -> RegionInfo:
        resolved = any(self.walked.get((region.path, row), False) for row in range(region.row, region.end_row + 1))
        return RegionInfo(region.path, region.row, region.end_row, region.kind, region.api, region.captured, resolved)

    # -- reports -> findings

    def _keep(self, finding: Finding) -> None:
        key = (
            finding.at,
            finding.code,
            finding.region,
        )  # a suppression on one region's way leaves the others; pipeline joins what is left
        known = self.findings.get(key)
        if known is None or len(finding.trace) < len(known.trace):
            self.findings[key] = finding

    def finding(self, report: Report) -> Finding:
        rule = self.book.by_name[report.rule]
        text = self.text(report.frame, report.at)
        words = {"call": text, "value": text, "why": "", "where": ""}
        if report.capture is not None:
            words["where"] = f"{_short(report.capture.frame.module.path)}:{report.capture.at[0]}"
        words.update({key: value for key, value in report.words.items() if value})
        return Finding(
            code=rule.code,
            name=rule.name,
            family=rule.family,
            severity=rule.severity,
            message=rule.message.format_map(words),
            help=report.help or rule.help,
            at=self.place(report.frame, report.at),
            region=_region(report.capture),
            trace=tuple(trace(report.frame, report.capture)),
            related=tuple(Related(frame.module.path, at[0], why) for frame, at, why in report.related),
        )

    def _source_lines(self, path: str) -> list[str]:
        if path not in self.lines:
            source = self.sources.by_path(path)
            self.lines[path] = source.text.split("\n") if source is not None else []
        return self.lines[path]

    def place(self, frame: ev.Frame, at: ir.Span) -> Place:
        path = frame.module.path
        lines = self._source_lines(path)
        return Place(path, at[0], _column(lines, at[0], at[1]), at[2], _column(lines, at[2], at[3]))

    def text(self, frame: ev.Frame, at: ir.Span) -> str:
        """The source text of a span on one line, cut where it gets long."""
        lines = self._source_lines(frame.module.path)
        if not 0 < at[0] <= len(lines):
            return ""
        if at[0] == at[2]:
            raw = lines[at[0] - 1].encode()[at[1] : at[3]].decode(errors="replace")
        else:
            raw = " ".join([lines[at[0] - 1].encode()[at[1] :].decode(errors="replace"), *lines[at[0] : at[2]]])
        flat = " ".join(raw.split())
        return flat if len(flat) <= 60 else flat[:57].rstrip() + "..."


def _column(lines: list[str], row: int, offset: int) -> int:
    """A byte offset in a row -> a column that counts characters from 1."""
    if not 0 < row <= len(lines):
        return offset + 1
    line = lines[row - 1]
    return offset + 1 if line.isascii() else len(line.encode()[:offset].decode(errors="ignore")) + 1


def _short(path: str) -> str:
    return path.replace("\\", "/").rpartition("/")[2]


def _region(capture: ev.Capture | None) -> RegionRef | None:
    return None if capture is None else RegionRef(capture.frame.module.path, capture.at[0], capture.kind)


def trace(frame: ev.Frame, capture: ev.Capture | None) -> Iterator[Step]:
    """The calls that lead from the capture to the frame, outermost first."""
    steps: list[Step] = []
    here: ev.Frame | None = frame
    while (
        here is not None
        and here.call_at is not None
        and here.parent is not None
        and (capture is None or here is not capture.frame)
    ):
        steps.append(Step(here.parent.module.path, here.call_at[0], here.name))
        here = here.parent
    if capture is not None and here is not capture.frame and capture.kind not in ("compile", "capture-safe"):
        # the fault lies beside the region (a refill, a later change): the way there says nothing about the capture
        return
    yield from reversed(steps[:12])
