"""Which findings the user wants: `select`, `extend-select`, `ignore`, `per-file-ignores`.

A selector is `ALL`, a severity (`crash`), a family (`rng`), a code or its beginning (`CG1`), or a rule's name
(`host-rng`). The
more exact selector wins; of two equally exact ones, `ignore` does.
"""

from __future__ import annotations

import fnmatch
import os
import re

from graphlint.config import Config
from graphlint.findings import Finding

_NONE = -1


def exactness(selector: str, finding: Finding) -> int:
    """How exactly a selector means a finding; negative when it does not."""
    if selector == finding.name or selector.upper() == finding.code:
        return 100
    if selector == finding.family:
        return 50
    if re.fullmatch(r"CG\d*", selector.upper()) and finding.code.startswith(selector.upper()):
        return 10 * len(selector) - 10
    if selector == finding.severity:
        return 5
    return 0 if selector.upper() == "ALL" else _NONE


def wanted(finding: Finding, config: Config) -> bool:
    """Whether `config` asks for a finding of this rule in this file."""
    chosen = max((exactness(selector, finding) for selector in (*config.select, *config.extend_select)), default=_NONE)
    refused = max((exactness(selector, finding) for selector in config.ignore), default=_NONE)
    if chosen <= refused or chosen == _NONE:
        return False
    for pattern, selectors in config.per_file_ignores:
        if any(exactness(selector, finding) > _NONE for selector in selectors) and matches(
            finding.at.filename, pattern, config.root
        ):
            return False
    return True


def matches(filename: str, pattern: str, root: str) -> bool:
    """Whether a shown file name fits a pattern: by its last part, or by its path from `root`; a leading `!` turns it
    round.
    """
    if pattern.startswith("!"):
        return not matches(filename, pattern[1:], root)
    inner = os.path.relpath(os.path.abspath(filename), root).replace(os.sep, "/")
    pattern = pattern.removeprefix("./").rstrip("/")
    spellings = (
        (pattern, pattern + "/*", "*/" + pattern)
        if "/" not in pattern
        else (pattern, pattern + "/*", pattern.replace("**/", ""))
    )
    return fnmatch.fnmatch(os.path.basename(filename), pattern) or any(
        fnmatch.fnmatch(inner, spelling) for spelling in spellings
    )
