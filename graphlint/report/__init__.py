"""`LintResult` -> text in one of the formats; nothing here judges, nothing here prints."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from graphlint.findings import LintResult
from graphlint.report.view import View

# format -> where its function `(LintResult, View) -> str` lives; loaded when chosen
_WRITERS = {
    "full": "text:full",
    "concise": "text:concise",
    "json": "data:json_list",
    "json-lines": "data:json_lines",
    "sarif": "sarif:sarif",
    "github": "ci:github",
    "gitlab": "ci:gitlab",
    "junit": "ci:junit",
}
HUMAN = ("full", "concise")  # read by people: a summary may follow


def render(result: LintResult, output_format: str, view: View) -> str:
    """The whole report, ending in a newline unless empty. Raises KeyError for an unknown format."""
    module, function = _WRITERS[output_format].split(":")
    writer: Callable[[LintResult, View], str] = getattr(importlib.import_module(f"graphlint.report.{module}"), function)
    return writer(result, view)
