"""Names for findings that stay the same when lines move: rule, file, scope and the text of the line, but no line
number.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

from graphlint.findings import Finding
from graphlint.report.view import View


def fingerprints(findings: Sequence[Finding], view: View) -> list[str]:
    """One of 32 hexadecimal digits for each finding; equal lines of one scope are told apart by their order."""
    seen: Counter[tuple[str, ...]] = Counter()
    out = []
    for finding in findings:
        at = finding.at
        text = " ".join(view.line(at.filename, at.row).split())
        key = (finding.code, view.relative(at.filename), view.scope(at.filename, at.row), text)
        out.append(
            hashlib.blake2b("\0".join((*key, str(seen[key]))).encode("utf-8", "replace"), digest_size=16).hexdigest()
        )
        seen[key] += 1
    return out
