"""Reports that code hosts and build servers read: GitHub annotations, GitLab code quality, JUnit XML."""

from __future__ import annotations

import itertools
import json
from xml.sax.saxutils import escape, quoteattr

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
    where = f"file={_property(at.filename)},line={at.row},col={at.column},endLine={at.end_row or at.row},endColumn={at.end_column or at.column}"
    way = f"\n  reached from the capture at {finding.region.filename}:{finding.region.row}" if finding.region else ""
    cure = f"\n  help: {finding.help}" if finding.help else ""
    text = f"{at.filename}:{at.row}:{at.column}: {finding.code} {finding.name}: {finding.message}{way}{cure}"
    return f"::{_GITHUB[finding.severity]} title=graphlint ({finding.code}),{where}::{_value(text)}\n"


def _trouble(problem: Problem) -> str:
    return f"::error title=graphlint,file={_property(problem.filename)},line={problem.row or 1}::{_value(problem.message)}\n"


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
    suites = [
        _suite(filename, list(group))
        for filename, group in itertools.groupby(result.findings, lambda finding: finding.at.filename)
    ]
    suites += [_error_suite(problem) for problem in result.problems]
    if not suites:
        suites = [
            '  <testsuite name="graphlint" tests="1" failures="0" errors="0">\n    <testcase name="graphlint"/>\n  </testsuite>\n'
        ]
    failures, errors = len(result.findings), len(result.problems)
    head = (
        f'<testsuites name="graphlint" tests="{max(1, failures + errors)}" failures="{failures}" errors="{errors}">\n'
    )
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + head + "".join(suites) + "</testsuites>\n"


def _suite(filename: str, findings: list[Finding]) -> str:
    cases = "".join(
        f'    <testcase name={_attribute(f"{finding.code} {finding.name}")} classname={_attribute(filename)} file={_attribute(filename)} line="{finding.at.row}">\n'
        f"      <failure message={_attribute(finding.message)}>{_text(f'{filename}:{finding.at.row}:{finding.at.column}: {finding.message}')}</failure>\n"
        "    </testcase>\n"
        for finding in findings
    )
    return f'  <testsuite name={_attribute(filename)} tests="{len(findings)}" failures="{len(findings)}" errors="0">\n{cases}  </testsuite>\n'


def _error_suite(problem: Problem) -> str:
    name = _attribute(problem.filename)
    case = f"    <testcase name={name}><error message={_attribute(problem.message)}/></testcase>\n"
    return f'  <testsuite name={name} tests="1" failures="0" errors="1">\n{case}  </testsuite>\n'


def _attribute(text: str) -> str:
    return quoteattr(_legal(text))


def _text(text: str) -> str:
    return escape(_legal(text))


def _legal(text: str) -> str:
    """XML 1.0 knows no control characters, not even escaped."""
    return "".join(c if c in "\t\n" or c >= " " else "?" for c in text)
