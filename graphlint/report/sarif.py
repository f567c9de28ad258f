"""SARIF 2.1.0: the way from the capture as a code flow, URIs relative to the repository, suppressions, stable
fingerprints.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import Any
from urllib.parse import quote

from graphlint import __version__, rulebook
from graphlint.findings import Finding, Fix, LintResult, Place, Problem, Suppressed
from graphlint.report.fingerprint import fingerprints
from graphlint.report.page import page
from graphlint.report.view import View

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
LEVELS = {"crash": "error", "silent": "error", "leak": "warning", "slow": "warning", "note": "note"}


def sarif(result: LintResult, view: View) -> str:
    """One run with its rules, results (the suppressed ones marked) and whatever could not be done."""
    findings = [*result.findings, *(item.finding for item in result.suppressed)]
    marks = [None] * len(result.findings) + list(result.suppressed)
    codes = sorted({finding.code for finding in findings})
    run = {
        "tool": {
            "driver": {
                "name": "graphlint",
                "semanticVersion": __version__,
                "rules": [_rule(code, findings) for code in codes],
            }
        },
        "columnKind": "unicodeCodePoints",
        "invocations": [
            {
                "executionSuccessful": not result.problems,
                "toolExecutionNotifications": [_notification(problem, view) for problem in result.problems],
            }
        ],
        "results": [
            _result(finding, mark, fingerprint, codes, view)
            for finding, mark, fingerprint in zip(findings, marks, fingerprints(findings, view), strict=True)
        ],
    }
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2) + "\n"


def _rule(code: str, findings: Iterable[Finding]) -> dict[str, Any]:
    example = next(finding for finding in findings if finding.code == code)
    rule = rulebook.load().get(code)
    text = (rule.summary if rule else "") or example.help or example.name
    pages = {"help": {"text": rule.help, "markdown": page(rule)}} if rule else {}
    return {
        "id": code,
        "name": example.name,
        "shortDescription": {"text": text},
        **pages,
        "defaultConfiguration": {"level": LEVELS[example.severity]},
        "properties": {"tags": [example.family, example.severity]},
    }


def _result(
    finding: Finding, mark: Suppressed | None, fingerprint: str, codes: list[str], view: View
) -> dict[str, Any]:
    way = [_flow_step(place, text, view) for place, text in _steps(finding)]
    out: dict[str, Any] = {
        "ruleId": finding.code,
        "ruleIndex": codes.index(finding.code),
        "level": LEVELS[finding.severity],
        "message": {"text": finding.message + (f"\nhelp: {finding.help}" if finding.help else "")},
        "locations": [_location(finding.at, view)],
        "partialFingerprints": {"graphlint/v1": fingerprint},
    }
    if len(way) > 1:
        out["codeFlows"] = [{"threadFlows": [{"locations": way}]}]
    if finding.related:
        places = [(Place(other.filename, other.row), other.message) for other in finding.related]
        out["relatedLocations"] = [
            {"id": i, **_location(place, view, text)} for i, (place, text) in enumerate(places, 1)
        ]
    if finding.fix:
        out["fixes"] = [_fix(finding.fix, view)]
    if mark:
        out["suppressions"] = [_suppression(mark, view)]
    return out


def _steps(finding: Finding) -> list[tuple[Place, str]]:
    region = finding.region
    steps = [(Place(region.filename, region.row), "the capture begins here")] if region else []
    steps += [(Place(step.filename, step.row), f"calls {step.name}") for step in finding.trace]
    return [*steps, (finding.at, finding.message)]


def _flow_step(place: Place, text: str, view: View) -> dict[str, Any]:
    return {"location": _location(place, view, text)}


def _location(at: Place, view: View, text: str = "") -> dict[str, Any]:
    message = {"message": {"text": text}} if text else {}
    return {"physicalLocation": {"artifactLocation": _artifact(at.filename, view), "region": _region(at)}, **message}


def _artifact(filename: str, view: View) -> dict[str, str]:
    path = view.relative(filename)
    if os.path.isabs(path):
        return {"uri": "file://" + quote(path)}
    return {"uri": quote(path), "uriBaseId": "SRCROOT"}


def _region(at: Place) -> dict[str, int]:
    if not at.end_row:
        return {"startLine": at.row} if at.column == 1 else {"startLine": at.row, "startColumn": at.column}
    return {"startLine": at.row, "startColumn": at.column, "endLine": at.end_row, "endColumn": at.end_column}


def _span(at: Place) -> dict[str, int]:
    """A span in full, since a region without columns would stand for the whole line."""
    end_row, end_column = (at.end_row, at.end_column) if at.end_row else (at.row, at.column)
    return {"startLine": at.row, "startColumn": at.column, "endLine": end_row, "endColumn": end_column}


def _fix(fix: Fix, view: View) -> dict[str, Any]:
    files = dict.fromkeys(edit.at.filename for edit in fix.edits)
    changes = [
        {
            "artifactLocation": _artifact(filename, view),
            "replacements": [
                {"deletedRegion": _span(edit.at), "insertedContent": {"text": edit.text}}
                for edit in fix.edits
                if edit.at.filename == filename
            ],
        }
        for filename in files
    ]
    return {"description": {"text": fix.title}, "artifactChanges": changes}


def _suppression(mark: Suppressed, view: View) -> dict[str, Any]:
    why = {"justification": mark.reason} if mark.reason else {}
    return {"kind": "inSource", **why, "location": _location(Place(mark.filename, mark.row), view)}


def _notification(problem: Problem, view: View) -> dict[str, Any]:
    at = Place(problem.filename, max(1, problem.row))
    return {
        "level": "error",
        "message": {"text": f"{problem.filename}: {problem.message}"},
        "locations": [_location(at, view)],
    }
