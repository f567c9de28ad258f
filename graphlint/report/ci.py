"""Reports that code hosts and build servers read: GitHub annotations, GitLab code quality, JUnit XML."""

from __future__ import annotations

import itertools
import json
from xml.etree import ElementTree

from graphlint.findings import Finding, LintResult, Problem
from graphlint.report.fingerprint import fingerprints
from graphlint.report.view import View

_GITHUB = {"crash": "error", "silent": "error", "leak": "warning", "slow": "warning", "note": "notice"}
_GITLAB = {"crash": "critical", "silent": "critical", "leak": "major", "slow": "minor", "note": "info"}


def github(result: LintResult, view: View) -> str:
    """One workflow command for each finding and each problem."""
    return "".join(map(_annotation, result.findings)) + "".join(map(_trouble, result.problems))


def _annotation(finding: Finding) -> str:
    at = finding.at
    end = f"endLine={at.end_row or at.row},endColumn={at.end_column or at.column}"
    where = f"file={_property(at.filename)},line={at.row},col={at.column},{end}"
    way = f"\n  reached from the capture at {finding.region.filename}:{finding.region.row}" if finding.region else ""
    cure = f"\n  help: {finding.help}" if finding.help else ""
    text = f"{at.filename}:{at.row}:{at.column}: {finding.code} {finding.name}: {finding.message}{way}{cure}"
    return f"::{_GITHUB[finding.severity]} title=graphlint ({finding.code}),{where}::{_value(text)}\n"


def _trouble(problem: Problem) -> str:
    where = f"file={_property(problem.filename)},line={problem.row or 1}"
    return f"::error title=graphlint,{where}::{_value(problem.message)}\n"


def _value(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _value(text).replace(":", "%3A").replace(",", "%2C")


def gitlab(result: LintResult, view: View) -> str:
    """GitLab's code quality list; fingerprints survive moved lines."""
    rows = [
        {
            "description": f"{finding.name}: {finding.message}",
            "check_name": finding.code,
            "fingerprint": fingerprint,
            "severity": _GITLAB[finding.severity],
            "location": {
                "path": view.relative(finding.at.filename),
                "positions": {
                    "begin": {"line": finding.at.row, "column": finding.at.column},
                    "end": {
                        "line": finding.at.end_row or finding.at.row,
                        "column": finding.at.end_column or finding.at.column,
                    },
                },
            },
        }
        for finding, fingerprint in zip(result.findings, fingerprints(result.findings, view), strict=True)
    ]
    return json.dumps(rows, indent=2) + "\n"


def junit(result: LintResult, view: View) -> str:
    """One suite for each file with findings, one failed case for each finding; problems are errors."""
    failures, errors = len(result.findings), len(result.problems)
    top = _element(None, "testsuites", tests=max(1, failures + errors), failures=failures, errors=errors)
    for filename, group in itertools.groupby(result.findings, lambda finding: finding.at.filename):
        _suite(top, filename, list(group))
    for problem in result.problems:
        case = _element(_element(top, "testsuite", problem.filename, tests=1, failures=0, errors=1), "testcase", "read")
        ElementTree.SubElement(case, "error", message=_legal(problem.message))
    if not len(top):
        _element(_element(top, "testsuite", tests=1, failures=0, errors=0), "testcase")
    ElementTree.indent(top)
    return ElementTree.tostring(top, "unicode", xml_declaration=True) + "\n"


def _suite(top: ElementTree.Element, filename: str, findings: list[Finding]) -> None:
    suite = _element(top, "testsuite", filename, tests=len(findings), failures=len(findings), errors=0)
    for finding in findings:
        name = f"{finding.code} {finding.name}"
        case = _element(suite, "testcase", name, classname=filename, file=filename, line=finding.at.row)
        failure = ElementTree.SubElement(case, "failure", message=_legal(finding.message))
        failure.text = _legal(f"{filename}:{finding.at.row}:{finding.at.column}: {finding.message}")


def _element(
    parent: ElementTree.Element | None, tag: str, name: str = "graphlint", **fields: str | int
) -> ElementTree.Element:
    attributes = {"name": _legal(name), **{key: _legal(str(value)) for key, value in fields.items()}}
    return ElementTree.Element(tag, attributes) if parent is None else ElementTree.SubElement(parent, tag, attributes)


def _legal(text: str) -> str:
    """XML 1.0 knows no control characters, not even escaped."""
    return "".join(c if c in "\t\n" or c >= " " else "?" for c in text)
