"""What the tests of the command share: small projects on disk, and an engine that finds one thing, so that the rooms
around it can be tested alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

from graphlint.config import Config
from graphlint.files import Source, Sources
from graphlint.findings import Finding, LintResult, Place, RegionInfo, RegionRef, Step


def project(root: Path, files: dict[str, str | bytes]) -> Path:
    """Writes files below `root`; texts are dedented."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        data = text if isinstance(text, bytes) else textwrap.dedent(text).encode()
        path.write_bytes(data)
    return root


def finding(filename: str, row: int, column: int = 1, end_column: int = 0, **more: object) -> Finding:
    """A host-sync finding at one place."""
    fields: dict[str, object] = {
        "code": "CG101",
        "name": "host-sync",
        "family": "host-sync",
        "severity": "crash",
        "message": "`x.item()` waits for the GPU",
        "help": "stay on the device",
        "at": Place(filename, row, column, row, end_column or column + 1),
    }
    return Finding(**{**fields, **more})  # type: ignore[arg-type]


def small_engine(sources: Sources, settings: Config) -> LintResult:
    """Stands for the engine: every `.item()` is a fault, `# region` marks the capture, `# unresolved` one that was not
    seen whole.
    """
    regions = tuple(_regions(sources))
    first = regions[0] if regions else None
    found = []
    for source in sources:
        for row, line in enumerate(source.lines(), 1):
            if ".item()" in line:
                column = line.index(".item()") + 1
                region = RegionRef(first.filename, first.row, first.kind) if first else None
                steps = (
                    (Step(first.filename, first.row + 1, "helper"),) if first and first.filename != source.path else ()
                )
                found.append(finding(source.path, row, column, column + 7, region=region, trace=steps))
    return LintResult(tuple(found), regions=regions)


def _regions(sources: Iterable[Source]) -> Iterator[RegionInfo]:
    for source in sources:
        for row, line in enumerate(source.lines(), 1):
            if line.strip().endswith(("# region", "# unresolved")):
                resolved = line.strip().endswith("# region")
                yield RegionInfo(source.path, row, row + 1, "graph", "torch.cuda.graph", "a block", resolved)


def command(
    *args: str | Path, cwd: Path, stdin: str | bytes = b"", timeout: float = 120, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs the real command in a process of its own; never with a terminal, never with the caller's cache."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("GRAPHLINT_", "FORCE_COLOR"))}
    data = stdin.encode() if isinstance(stdin, str) else stdin
    done = subprocess.run(
        [sys.executable, "-m", "graphlint", *map(str, args)],
        cwd=cwd,
        input=data,
        capture_output=True,
        env={**env, **environment},
        timeout=timeout,
    )
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())
