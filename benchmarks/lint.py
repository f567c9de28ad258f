"""How long a lint takes beside its peers, in one run: process time (user + system) of whole commands, and the ratio to
graphlint's cold run.

    python benchmarks/lint.py FOLDER... [--torchfix 120] [--runs 3] [--json results.json]

Peers that are not installed are left out. TorchFix pins an older libcst than graphlint needs: install it in an
environment of its own and name its command in TORCHFIX. ruff is no rival in kind (one file at a time, no idea of a
capture); it says what a fast linter
costs on this machine. TorchFix parses with libcst, so it gets a time limit: at the limit its figure is a lower bound.
Every command is run once before it is timed, the cold ones
without any cache of their own.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import click


def seconds(command: list[str], limit: float | None = None) -> tuple[float, bool]:
    """User plus system seconds of one run of the command and its children, and whether it ended by itself."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    try:
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return float(
            limit or 0
        ), False  # what its own workers have used by then nobody tells; the time on the clock is less than that
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, True


def commands(folder: Path, cache: Path) -> dict[str, list[str]]:
    """The commands to compare; what is not installed is missing."""
    python = sys.executable
    found = {
        "graphlint cold": [python, "-m", "graphlint", "check", "--no-cache", "-q", str(folder)],
        "graphlint warm": [python, "-m", "graphlint", "check", "--cache-dir", str(cache), "-q", str(folder)],
        "python start": [python, "-c", "pass"],
    }
    ruff = shutil.which("ruff", path=os.pathsep.join([str(Path(python).parent), os.environ.get("PATH", "")]))
    if ruff:
        found["ruff, default rules, no cache"] = [ruff, "check", "--isolated", "--no-cache", "-s", str(folder)]
    torchfix = os.environ.get("TORCHFIX") or shutil.which("torchfix")
    if torchfix:
        found["TorchFix"] = [torchfix, "--select", "ALL", str(folder)]
    return found


@click.command(help=__doc__)
@click.argument("folders", nargs=-1, required=True, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--runs", default=3, show_default=True, help="timed runs of each command; the median counts")
@click.option("--torchfix", default=120.0, show_default=True, help="seconds that TorchFix gets, one run")
@click.option("--json", "output", type=click.Path(path_type=Path), help="keep the figures as data")
def main(folders: tuple[Path, ...], runs: int, torchfix: float, output: Path | None) -> None:
    kept = []
    for folder in folders:
        files = sorted(folder.rglob("*.py"))
        lines = sum(path.read_bytes().count(b"\n") for path in files)
        click.echo(f"{folder.name}: {len(files):,} files, {lines:,} lines")
        with tempfile.TemporaryDirectory() as cache:
            base = 0.0
            for name, command in commands(folder, Path(cache)).items():
                limit = torchfix if name == "TorchFix" else None
                if limit is None:
                    seconds(command)
                times = [seconds(command, limit) for _ in range(1 if limit else runs)]
                median = statistics.median(time for time, _ in times)
                base = base or median
                bound = "" if all(ended for _, ended in times) else "more than "
                click.echo(f"  {name:32s} {bound}{median:8.2f} s   {bound}{median / base:7.2f} x graphlint cold")
                kept.append(
                    {
                        "folder": folder.name,
                        "files": len(files),
                        "lines": lines,
                        "tool": name,
                        "seconds": round(median, 3),
                        "ratio": round(median / base, 3),
                        "lower_bound": bool(bound),
                    }
                )
    if output:
        output.write_text(
            json.dumps(
                {
                    "python": platform.python_version(),
                    "machine": platform.machine(),
                    "cores": os.cpu_count(),
                    "rows": kept,
                },
                indent=1,
            )
            + "\n"
        )


if __name__ == "__main__":
    main()
