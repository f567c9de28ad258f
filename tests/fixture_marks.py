"""Reads fixtures: whole programs under `fixtures/`, their declared outcome and the marks that say what the linter must report.

A line that ends in `# error: [rule]` must be reported with that rule, unless the finding stands on a line that ends in `# or: [rule]`; every other line must stay
silent. Notes count on neither side.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "fixtures"
_MARK = re.compile(r"# (error|or): \[([a-z0-9, -]+)\]")


@dataclass(frozen=True)
class Mark:
    """One marked line: `file` relative to the fixture's folder."""

    file: str
    row: int
    rules: tuple[str, ...]
    main: bool  # an `# error` line, not an `# or` one


@dataclass(frozen=True)
class Fixture:
    name: str
    files: tuple[Path, ...]
    outcome: str
    marks: tuple[Mark, ...]

    @property
    def root(self) -> Path:
        return FOLDER / self.name if (FOLDER / self.name).is_dir() else FOLDER / f"{self.name}.py"

    @property
    def main(self) -> Path:
        return self.root / "main.py" if self.root.is_dir() else self.root


def load() -> list[Fixture]:
    """Every fixture, by name."""
    found = []
    for path in sorted(FOLDER.iterdir()):
        if path.is_dir() and (path / "main.py").exists():
            found.append(_read(path.name, tuple(sorted(path.rglob("*.py")))))
        elif path.suffix == ".py" and re.match(r"(crash|ok|silent|leak|slow|right)_", path.name):
            found.append(_read(path.stem, (path,)))
    return found


def _read(name: str, files: tuple[Path, ...]) -> Fixture:
    marks: list[Mark] = []
    outcome = ""
    for path in files:
        for row, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            declared = re.match(r'OUTCOME = "(\w+)"', line)
            if declared:
                outcome = declared.group(1)
            found = _MARK.findall(line)  # one line may say `# error: [a]  # or: [b]`
            if found:
                rules = tuple(part.strip() for _, names in found for part in names.split(","))
                marks.append(Mark(path.name, row, rules, any(kind == "error" for kind, _ in found)))
    return Fixture(name, files, outcome, tuple(marks))
