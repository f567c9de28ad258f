"""What a guard refused, as SARIF: the linter's own writer, fed with runtime errors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def sarif_of(faults: Iterable[Mapping[str, Any]], base: str = "") -> str:
    """SARIF 2.1.0 text. `faults` are errors as `CaptureError.to_dict` gives them; those without a line of the user's
    are left out, since SARIF needs a place. URIs are relative to the folder `base` (the current one when empty).
    """
    from graphlint import rulebook
    from graphlint.findings import Finding, LintResult, Place, Related
    from graphlint.report.sarif import sarif
    from graphlint.report.view import View

    book = rulebook.load()
    findings = []
    for fault in faults:
        if not fault["filename"]:
            continue
        page = book.get(str(fault["name"]))
        forward = str(fault["forward"] or "")
        filename, _, row = forward.rpartition(":")
        related = (Related(filename, int(row), "the forward call that this backward belongs to"),) if filename else ()
        findings.append(
            Finding(
                str(fault["code"]), str(fault["name"]), page.family if page else "side-effect",
                page.severity if page else "crash", f"{fault['message']} [{fault['stage']}]", str(fault["help"]),
                Place(str(fault["filename"]), int(fault["row"])), related=related,
            )
        )  # fmt: skip
    return sarif(LintResult(tuple(findings)), View(base))
