"""The whole static flow on one screen.

files -> summary (cached) -> link -> regions -> flow -> checks -> findings -> report
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterable, Iterator

import msgspec

from graphlint import cache, config, discover, progress, selection, suppress
from graphlint.config import Config
from graphlint.discover import Stdin
from graphlint.files import Source, Sources
from graphlint.findings import Finding, LintResult, Place, Problem, RegionInfo, Related

SMALL = 1 << 20  # a project of up to so many bytes is checked for syntax whole; a larger one where regions lead


def lint(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    settings: Config | None = None,
    stdin: Stdin | None = None,
) -> LintResult:
    """Lints files and folders as one program; without `settings`, with those of the nearest configuration.

    Answers with sorted findings, and with a `Problem` for each thing that could not be done. Raises
    `config.ConfigError`.
    """
    wanted = [os.fspath(path) for path in ([paths] if isinstance(paths, (str, os.PathLike)) else paths)]
    settings = settings or config.find(wanted)
    sources, troubles = discover.discover(wanted, settings, stdin)
    earlier = cache.RunCache(settings)
    result = earlier.load(sources)
    if result is None:
        result = run(sources, settings)
        earlier.save(sources, result)
    return msgspec.structs.replace(result, problems=(*troubles, *result.problems))


def run(sources: Sources, settings: Config) -> LintResult:
    """The work itself, without looking for an earlier result."""
    reading = progress.told(sources.linted, "reading", len(sources.linted))
    unreadable = [problem for source in reading if (problem := source.check())]
    with _no_collection():
        result = analyse(sources, settings)
    problems = _merged(unreadable, result.problems, _syntax_problems(sources))
    result = msgspec.structs.replace(result, problems=problems, files=len(sources.linted))
    cache.summary_store(settings).flush()
    return tidy(result, sources, settings)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Python's cycle collector looks at every live object again and again while millions of small ones are made.

    On the 2,300 files of torch it took three quarters of the process time (14 s, without it 3.6) and freed nothing.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def tidy(result: LintResult, sources: Sources, settings: Config) -> LintResult:
    """Raw findings -> what the user asked for: unsuppressed, about linted files, selected, each once, sorted."""
    result = _concerning(suppress.apply(result, sources, settings), sources)
    chosen = [finding for finding in result.findings if selection.wanted(finding, settings)]
    return msgspec.structs.replace(result, findings=tuple(_once(chosen)))


def _concerning(result: LintResult, sources: Sources) -> LintResult:
    """Only what has its fault or its cause (region, way, second place) in a linted file.

    A context file that can't be read is no failure of this run, but left open.
    """

    def linted(item: Problem | RegionInfo) -> bool:
        return sources.by_path(item.filename) is None or sources.is_linted(item.filename)

    def concerns(finding: Finding) -> bool:
        places = [finding.at.filename, *(step.filename for step in finding.trace)]
        places += [related.filename for related in finding.related]
        places += [finding.region.filename] if finding.region else []
        return any(map(sources.is_linted, places))

    aside = [problem for problem in result.problems if not linted(problem)]
    return msgspec.structs.replace(
        result,
        findings=tuple(filter(concerns, result.findings)),
        suppressed=tuple(item for item in result.suppressed if concerns(item.finding)),
        regions=tuple(sorted(filter(linted, result.regions), key=lambda item: (item.filename, item.row, item.kind))),
        problems=tuple(filter(linted, result.problems)),
        unresolved=(*filter(linted, result.unresolved), *aside),
    )


def _once(findings: Iterable[Finding]) -> list[Finding]:
    """Each fault once, by its shortest way; other regions that reach it too become related places."""
    groups: dict[tuple[object, ...], list[Finding]] = {}
    for finding in sorted(findings, key=_order):
        groups.setdefault((finding.at, finding.code), []).append(finding)
    return [_with_others(*group) for group in groups.values()]


def _order(finding: Finding) -> tuple[Place, str, int, str, int]:
    region = finding.region
    return finding.at, finding.code, len(finding.trace), region.filename if region else "", region.row if region else 0


def _with_others(first: Finding, *others: Finding) -> Finding:
    regions = dict.fromkeys(other.region for other in others if other.region and other.region != first.region)
    also = tuple(Related(region.filename, region.row, "another capture reaches it too") for region in regions)
    return msgspec.structs.replace(first, related=(*first.related, *also[:3])) if also else first


def _merged(*groups: Iterable[Problem]) -> tuple[Problem, ...]:
    """All problems in order, one for each file and row."""
    found = {(problem.filename, problem.row): problem for group in reversed(groups) for problem in group}
    return tuple(found[key] for key in sorted(found))


def _syntax_problems(sources: Sources) -> list[Problem]:
    """Files that Python can't parse, among those named one by one, or among all of a small project."""
    small = sum(source.stat.size for source in sources.linted) <= SMALL
    asked = sources.linted if small else [source for source in sources.linted if source.file in sources.named]
    return [problem for source in asked if (problem := syntax_problem(source))]


def syntax_problem(source: Source) -> Problem | None:
    """What is wrong with the syntax of one file, if anything; syntax newer than the running Python is not."""
    from graphlint import summary

    if source.check():
        return None
    try:
        summary.parse(source.text)
    except summary.SourceError as error:
        return Problem(source.path, error.row, str(error))
    return None


def analyse(sources: Sources, settings: Config) -> LintResult:
    """The engine: sources -> raw findings and regions. Loaded here, for a warm run needs none of it."""
    from graphlint import engine

    return engine.analyse(sources, settings)
