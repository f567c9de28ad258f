"""What a dry run hands back: findings, copies, draws, optimizers and the lines that ran; as text, as plain data, as
JSON. Imports no torch."""

from __future__ import annotations

import linecache
from pathlib import Path
from typing import Any

import msgspec

from graphlint.findings import Finding
from graphlint.runtime.dryrun.records import Copy, Draw, Trace

SCHEMA = 1


class Optimizer(msgspec.Struct, frozen=True):
    """An optimizer that stepped in the region, and the path it takes: `capturable`, `fused`, `foreach`, and how its
    learning rate is held."""

    name: str
    capturable: bool | None
    fused: bool | None
    foreach: bool | None
    lr: str


class DryRunReport(msgspec.Struct, frozen=True):
    """The outcome of one dry run.

    `findings` are sorted by place; `copies` and `draws` are all transfers and random draws of the captured run,
    harmless ones too; `executed` are the user's lines inside the region, by file; `runs` counts the runs that were
    compared; `device` says where it ran; `error` is the exception that ended the step early, if one did (what came
    after it was not looked at); `output` is what a program printed.
    """

    findings: tuple[Finding, ...]
    copies: tuple[Copy, ...] = ()
    draws: tuple[Draw, ...] = ()
    optimizers: tuple[Optimizer, ...] = ()
    executed: dict[str, list[int]] = {}
    runs: int = 1
    regions: int = 1
    operators: int = 0
    device: str = ""
    torch: str = ""
    error: str = ""
    output: str = ""

    @property
    def faults(self) -> tuple[Finding, ...]:
        """The findings that are more than notes."""
        return tuple(finding for finding in self.findings if finding.severity != "note")

    @property
    def ok(self) -> bool:
        """Whether the step can be captured and replayed as far as the dry run can tell."""
        return not self.faults and not self.error

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data; findings have the keys of the linter's JSON."""
        return {
            "schema": SCHEMA,
            "torch": self.torch,
            "device": self.device,
            "runs": self.runs,
            "regions": self.regions,
            "operators": self.operators,
            "error": self.error or None,
            "findings": [_finding(finding) for finding in self.findings],
            "copies": [{**_place(copy.site), **_fields(copy)} for copy in self.copies],
            "draws": [{**_place(draw.site), **_fields(draw)} for draw in self.draws],
            "optimizers": [_fields(optimizer) for optimizer in self.optimizers],
            "executed": self.executed,
        }

    def to_json(self) -> str:
        """`to_dict` as JSON text."""
        return msgspec.json.format(msgspec.json.encode(self.to_dict()), indent=2).decode()

    def to_text(self) -> str:
        """The report for people: one block per finding, then what else the step does."""
        blocks = [_block(finding) for finding in self.findings]
        if self.error:
            blocks.append(f"the step ended early: {self.error}\n  what would have come after it was not looked at")
        return "\n\n".join([*blocks, self._summary()])

    def _summary(self) -> str:
        count = len(self.faults)
        verdict = "no violation found" if self.ok else f"{count} violation{'s' if count != 1 else ''} found"
        how = f"{self.operators} operators, {self.runs} runs compared, {self.device}, torch {self.torch}"
        lines = [f"dry run: {verdict} ({how})"]
        moved = [copy for copy in self.copies if copy.pinned and copy.non_blocking]
        if moved:
            lines.append(f"  {len(moved)} pinned copies that a graph repeats at every replay")
        by_generator = sorted({draw.generator for draw in self.draws})
        if self.draws:
            lines.append(f"  {len(self.draws)} random draws, from: {', '.join(by_generator)}")
        for optimizer in self.optimizers:
            path = "fused" if optimizer.fused else "foreach" if optimizer.foreach else "default"
            lines.append(f"  {optimizer.name}: {path} path, capturable={optimizer.capturable}, lr is a {optimizer.lr}")
        return "\n".join(lines)


def executed_lines(*traces: Trace) -> dict[str, list[int]]:
    """The user's lines that ran in the traces, by file, sorted."""
    found: dict[str, set[int]] = {}
    for trace in traces:
        for filename, row in trace.lines:
            found.setdefault(filename, set()).add(row)
        for op in trace.ops:
            found.setdefault(op.site.filename, set()).add(op.site.row)
    return {filename: sorted(rows) for filename, rows in sorted(found.items()) if Path(filename).suffix}


def _fields(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__struct_fields__ if name != "site"}


def _place(site: Any) -> dict[str, Any]:
    return {"filename": site.filename, "row": site.row}


def _finding(finding: Finding) -> dict[str, Any]:
    """A finding with the keys of the linter's JSON."""
    return {
        "code": finding.code,
        "name": finding.name,
        "family": finding.family,
        "severity": finding.severity,
        "message": finding.message,
        "help": finding.help,
        "filename": finding.at.filename,
        "location": {"row": finding.at.row, "column": finding.at.column},
        "end_location": {
            "row": finding.at.end_row or finding.at.row,
            "column": finding.at.end_column or finding.at.column,
        },
        "trace": [{"filename": step.filename, "row": step.row, "name": step.name} for step in finding.trace],
        "related": [{"filename": note.filename, "row": note.row, "message": note.message} for note in finding.related],
        "url": f"rules/{finding.name}.md",
    }


def _block(finding: Finding) -> str:
    """One finding: place, words, the line, the way there, the cure."""
    at = finding.at
    lines = [
        f"{at.filename}:{at.row}:{at.column}: {finding.code} {finding.name} ({finding.severity})",
        f"  {finding.message}",
    ]
    text = linecache.getline(at.filename, at.row).strip()
    if text:
        lines.append(f"  > {text}")
    lines.extend(f"  via {step.filename}:{step.row} in {step.name}" for step in finding.trace[-4:])
    lines.extend(f"  see {note.filename}:{note.row}: {note.message}" for note in finding.related)
    if finding.help:
        lines.append(f"  help: {finding.help}")
    return "\n".join(lines)
