"""A page of the rulebook as readers see it."""

from __future__ import annotations

import re

from graphlint.rulebook import Rule


def page(rule: Rule) -> str:
    """The Markdown page; its table of facts, which is for graphlint, becomes one line."""
    facts = f"{rule.code}, {rule.severity}, family {rule.family}, since {rule.since}\n"
    return re.sub(r"```toml\n.*?^```\n", lambda _: facts, rule.page, count=1, flags=re.S | re.M)
