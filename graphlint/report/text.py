"""Reports for people: `full` shows the source, the way from the capture and the cure; `concise` is one line for each
finding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import click

from graphlint.findings import Finding, LintResult, RegionRef, Step
from graphlint.report.frame import frame, one_line
from graphlint.report.view import View
from graphlint.rulebook import SEVERITIES

COLOURS = {"crash": "red", "silent": "magenta", "leak": "yellow", "slow": "yellow", "note": "blue"}
MAX_STEPS = 8  # of a longer way, the first and the last calls are shown


def concise(result: LintResult, view: View) -> str:
    """`path:row:column: CODE name: message`, as editors and `grep` like it."""
    return "".join(_head(finding, view) + "\n" for finding in result.findings)


def full(result: LintResult, view: View) -> str:
    """Each finding with its frame, way and cure, then an empty line."""
    return "".join("\n".join(_whole(finding, view)) + "\n\n" for finding in result.findings)


def _head(finding: Finding, view: View) -> str:
    at = finding.at
    place = _style(f"{at.filename}:{at.row}:{at.column}", view, bold=True)
    code = _style(finding.code, view, fg=COLOURS[finding.severity], bold=True)
    mark = " [*]" if finding.fix else ""
    return f"{place}: {code}{mark} {finding.name}: {finding.message}"


def _whole(finding: Finding, view: View) -> Iterable[str]:
    yield _head(finding, view)
    lines = frame(finding.at, view, finding.severity)
    for line in lines:
        yield _paint(line, finding.severity, view)
    gutter = " " * (lines[0].index("|") if lines else 2)
    for note in (*_way(finding, view), *_related(finding, view), *_cures(finding)):
        if note.startswith("  "):
            yield f"{gutter}  {note}"
            continue
        label, _, rest = note.partition(": ")
        yield f"{gutter}{_style('=', view, fg='cyan')} {_style(label, view, bold=True)}: {rest}"


def _way(finding: Finding, view: View) -> list[str]:
    """From the capture to the fault, one call a line, each indented below its caller."""
    region = finding.region
    if region is None or ((region.filename, region.row) == (finding.at.filename, finding.at.row) and not finding.trace):
        return []
    steps = [step for step in finding.trace if (step.filename, step.row) != (region.filename, region.row)]
    if not steps:
        return [f"captured at: {_place_and_line(region, view)}"]
    way = [(region.filename, region.row, region.kind), *((step.filename, step.row, step.name) for step in steps)]
    wide = max(len(f"{filename}:{row}") for filename, row, _ in way)
    calls = [
        f"  {f'{filename}:{row}':<{wide}}  {'  ' * depth}{one_line(view.line(filename, row)) or name}"
        for depth, (filename, row, name) in enumerate(way)
    ]
    if len(calls) > MAX_STEPS:
        hidden = len(calls) - MAX_STEPS
        calls[MAX_STEPS // 2 : MAX_STEPS // 2 + hidden] = [f"  {'...':<{wide}}  {hidden} more calls"]
    return [f"reached from: the capture, through {_names(steps)}", *calls]


def _names(steps: list[Step]) -> str:
    names = list(dict.fromkeys(step.name for step in steps))
    if len(names) > 4:
        names = [*names[:2], f"{len(names) - 3} more", names[-1]]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _place_and_line(region: RegionRef, view: View) -> str:
    text = one_line(view.line(region.filename, region.row))
    return f"{region.filename}:{region.row}" + (f"  {text}" if text else "")


def _related(finding: Finding, view: View) -> list[str]:
    notes = []
    for related in finding.related:
        notes.append(f"see also: {related.message}, at {related.filename}:{related.row}")
        text = one_line(view.line(related.filename, related.row))
        notes += [f"  {text}"] if text else []
    return notes


def _cures(finding: Finding) -> list[str]:
    return [f"help: {finding.help}"] if finding.help else []


def _paint(line: str, severity: str, view: View) -> str:
    bar = line.index("|") + 1
    tail = line[bar:]
    if set(tail.split()[:1] or [""]) <= {"^" * len((tail.split() or [""])[0])} and "^" in tail:
        tail = _style(tail, view, fg=COLOURS[severity], bold=True)
    return _style(line[:bar], view, fg="cyan") + tail


def _style(text: str, view: View, fg: str | None = None, bold: bool | None = None) -> str:
    return click.style(text, fg=fg, bold=bold) if view.colour else text


def summary(result: LintResult) -> str:
    """The last lines of a report for people: how much was found, or what "nothing" means."""
    if not result.files:
        return ""
    lines = [_verdict(result)]
    fixable = sum(finding.fix is not None and finding.fix.safe for finding in result.findings)
    unsafe = sum(finding.fix is not None and not finding.fix.safe for finding in result.findings)
    if fixable or unsafe:
        more = f" ({unsafe} more with `--unsafe-fixes`)" if unsafe else ""
        lines.append(f"[*] {fixable} can be mended with `--fix`{more}.")
    if result.unresolved:
        calls = _count(len(result.unresolved), "call")
        lines.append(f"{calls} in capture regions could not be resolved; `--verbose` lists them.")
    return "\n".join(lines) + "\n"


def _verdict(result: LintResult) -> str:
    counts = Counter(finding.severity for finding in result.findings)
    where = f"{_count(len(result.regions), 'capture region')} in {_count(result.files, 'file')}"
    if not counts:
        if not result.regions:
            return f"No capture region in {_count(result.files, 'file')}: nothing to check."
        return f"All checks passed: {where}."
    parts = ", ".join(f"{counts[word]} {word}" for word in SEVERITIES if counts[word])
    return f"Found {_count(sum(counts.values()), 'problem')} ({parts}); {where}."


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def statistics(result: LintResult, view: View) -> str:
    """How often each rule spoke, most frequent first: count, code, severity, name."""
    counts = Counter((finding.code, finding.severity, finding.name) for finding in result.findings)
    if not counts:
        return ""
    wide = len(str(max(counts.values())))
    rows = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return "".join(
        f"{count:>{wide}}  {_style(code, view, fg=COLOURS[severity], bold=True)}  {severity:<6}  {name}\n"
        for (code, severity, name), count in rows
    )
