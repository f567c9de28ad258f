"""Reports for programs: `json`, `json-lines`, and the lists that `regions` and `rules` print."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from graphlint.findings import Finding, Fix, LintResult, Place, RegionInfo
from graphlint.report.view import View


def json_list(result: LintResult, view: View) -> str:
    """A list of objects, a superset of ruff's."""
    return dump([as_dict(finding) for finding in result.findings])


def json_lines(result: LintResult, view: View) -> str:
    """One object a line."""
    return "".join(json.dumps(as_dict(finding)) + "\n" for finding in result.findings)


def json_statistics(result: LintResult, view: View) -> str:
    """`[{"code", "name", "severity", "count"}]`, most frequent first."""
    counts = Counter((finding.code, finding.name, finding.severity) for finding in result.findings)
    rows = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return dump(
        [{"code": code, "name": name, "severity": severity, "count": count} for (code, name, severity), count in rows]
    )


def json_regions(regions: tuple[RegionInfo, ...]) -> str:
    """A list of `filename`, `row`, `end_row`, `kind`, `api`, `captured`, `resolved`."""
    return dump([{field: getattr(region, field) for field in RegionInfo.__struct_fields__} for region in regions])


def dump(rows: list[dict[str, Any]]) -> str:
    """Indented JSON, in ASCII so that it survives every pipe."""
    return json.dumps(rows, indent=2) + "\n"


def as_dict(finding: Finding) -> dict[str, Any]:
    """One finding as the object that `json` prints."""
    region = finding.region
    return {
        "cell": None,
        "code": finding.code,
        "name": finding.name,
        "family": finding.family,
        "severity": finding.severity,
        "message": finding.message,
        "help": finding.help,
        "filename": finding.at.filename,
        "location": _start(finding.at),
        "end_location": _end(finding.at),
        "region": {"filename": region.filename, "row": region.row, "kind": region.kind} if region else None,
        "trace": [{"filename": step.filename, "row": step.row, "name": step.name} for step in finding.trace],
        "related": [
            {"filename": other.filename, "row": other.row, "message": other.message} for other in finding.related
        ],
        "fix": _fix(finding.fix) if finding.fix else None,
        "noqa_row": finding.at.row,
        "url": f"rules/{finding.name}.md",
    }


def _fix(fix: Fix) -> dict[str, Any]:
    return {
        "message": fix.title,
        "applicability": "safe" if fix.safe else "unsafe",
        "edits": [
            {
                "filename": edit.at.filename,
                "content": edit.text,
                "location": _start(edit.at),
                "end_location": _end(edit.at),
            }
            for edit in fix.edits
        ],
    }


def _start(at: Place) -> dict[str, int]:
    return {"row": at.row, "column": at.column}


def _end(at: Place) -> dict[str, int]:
    return {"row": at.end_row, "column": at.end_column} if at.end_row else _start(at)
