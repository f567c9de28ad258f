"""Every example of every rule page is linted as a program, and so is everything that was measured on a GPU.

A line that ends in `# error` must be reported with the rule of the page, `# error: [name]` with that one; `# or` marks
another fair place for the same fault. Unmarked lines must stay silent, notes aside. Programs elsewhere on a page are
cures: no finding at all.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import measure
import pytest

from graphlint import config, pipeline, rulebook
from graphlint.findings import Finding, Place
from graphlint.rulebook import Rule

BOOK = rulebook.load()
MEASURED: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "measured.json").read_text(encoding="utf-8"))
BLOCK = re.compile(r"^```py\n(.*?)^```", re.S | re.M)
MARK = re.compile(r"\s*# (error|or)(?:: \[([a-z-]+)\])?(?=\s*$|\s+#)")
# Programs that fail for a reason which the linter says it does not look for (`Known limits` of the page named).
LIMITS = {"ipc_share": "stream-sync"}


def programs(rule: Rule) -> Iterator[tuple[str, bool, str]]:
    """`(name, is an example, text)` of each program on a page."""
    for number, found in enumerate(BLOCK.finditer(rule.page), 1):
        section = re.findall(r"^## (.+)$", rule.page[: found.start()], re.M)[-1]
        yield f"{rule.name}-{number}", section == "Examples", found.group(1)


EXAMPLES = [(rule, *program) for rule in BOOK.rules for program in programs(rule)]


def marks(text: str, rule: str) -> dict[str, dict[str, set[int]]]:
    """Rule -> kind (`error`, `or`) -> rows that carry such a mark."""
    found: dict[str, dict[str, set[int]]] = defaultdict(lambda: {"error": set(), "or": set()})
    for row, line in enumerate(text.splitlines(), 1):
        for kind, name in MARK.findall(line):
            found[name or rule][kind].add(row)
    return found


def lint(folder: Path, name: str, text: str) -> list[Finding]:
    """The findings of one program, for the torch release that its first line may ask for."""
    file = folder / f"program_{name.replace('-', '_')}.py"  # a file `pickle.py` would hide the module of that name
    file.write_text(text, encoding="utf-8")
    wanted = re.match(r"# target-torch: (\S+)", text)
    settings = config.Config(root=str(folder), cache=False)
    if wanted:
        settings = config.override(settings, {"target-torch": wanted.group(1)}, name)
    result = pipeline.lint([str(file)], settings)
    assert not result.problems, result.problems
    return list(result.findings)


def disagreements(text: str, rule: str, findings: list[Finding]) -> list[str]:
    """What was reported and not marked, or marked and not reported; empty when both say the same."""
    wanted, lines = marks(text, rule), text.splitlines()
    got: dict[str, set[int]] = defaultdict(set)
    for finding in findings:
        if finding.severity != "note" or finding.at.row in wanted[finding.name]["error"]:
            got[finding.name].add(finding.at.row)
    wrong = []
    for name in sorted({*wanted, *got}):
        error, other = wanted[name]["error"], wanted[name]["or"]
        missing = error - got[name] if not other or not got[name] else set()
        wrong += [f"missed {name} at {row}: {lines[row - 1].strip()}" for row in sorted(missing)]
        wrong += [f"raised {name} at {row}: {lines[row - 1].strip()}" for row in sorted(got[name] - error - other)]
    return wrong


@pytest.mark.parametrize(("rule", "name", "example", "text"), EXAMPLES, ids=[entry[1] for entry in EXAMPLES])
def test_a_page_means_what_it_says(rule: Rule, name: str, example: bool, text: str, tmp_path: Path) -> None:
    assert example or not MARK.search(text), "only examples carry marks"
    findings = lint(tmp_path, name, MARK.sub("", text))
    assert disagreements(text, rule.name, findings) == []


@pytest.mark.parametrize("row", MEASURED["constructs"], ids=lambda row: row["name"])
def test_the_linter_agrees_with_the_gpu(row: dict[str, Any], tmp_path: Path) -> None:
    release = ".".join(map(str, rulebook.parse_version(MEASURED["torch"])))
    text = f"# target-torch: {release}\n" + measure.program(row)
    crashes = sorted({finding.name for finding in lint(tmp_path, row["name"], text) if finding.severity == "crash"})
    if row["name"] in LIMITS:
        assert crashes == [] and "_share_cuda_" in BOOK.by_name[LIMITS[row["name"]]].page
    elif row["verdict"] == "capture-error":
        assert row["rule"] in crashes
    elif row["name"] not in {"manual_seed", "cuda_manual_seed"}:  # seeded alike: see `seed-in-region`
        assert crashes == []


def test_a_missed_and_a_wrong_report_are_both_told() -> None:
    text = "a()  # error\nb()\nc()  # error: [host-copy]\n"
    assert disagreements(text, "host-sync", []) == [
        "missed host-copy at 3: c()  # error: [host-copy]",
        "missed host-sync at 1: a()  # error",
    ]
    place = Finding("CG101", "host-sync", "host-sync", "crash", "", "", Place("program.py", 2))
    assert disagreements("a()\nb()\n", "host-sync", [place]) == ["raised host-sync at 2: b()"]
    assert disagreements("a()  # error\nb()  # or\n", "host-sync", [place]) == []
