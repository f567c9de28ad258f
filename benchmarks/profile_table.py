"""Writes the results of `profile_gain.py` into the table of docs/profile.md. Needs neither torch nor a GPU.

python benchmarks/profile_table.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from graphlint.runtime.profiling.advice import time

HERE = Path(__file__).parent
RESULTS, PAGE = HERE / "results" / "profile_gain.json", HERE.parent / "docs" / "profile.md"
BEGIN, END = "<!-- profile_gain: written by benchmarks/profile_table.py -->", "<!-- profile_gain ends -->"

NAMES = {
    "small_gpt": "small GPT, training",
    "mlp_inference": "24-layer MLP, inference",
    "detection": "detector, one batch of it",
    "mixed": "compute-bound trunk, launch-bound head",
    "medium_gpt": "medium GPT, training",
    "large_gpt": "large GPT, training",
}


def main() -> None:
    """Rewrites the page."""
    PAGE.write_text(filled(PAGE.read_text(), json.loads(RESULTS.read_text())))


def filled(page: str, results: dict[str, Any]) -> str:
    """The page with the results between its marks."""
    text = "\n".join([BEGIN, "", *tables(results["workloads"]), "", END])
    return re.sub(re.escape(BEGIN) + ".*?" + re.escape(END), lambda _: text, page, flags=re.DOTALL)


def tables(rows: dict[str, Any]) -> Iterator[str]:
    """One table of whole steps, one of single modules with the rest of the step around them."""
    yield "| step | launch-bound | advice | eager | as one graph: projected | measured | gain: projected | measured | off |"
    yield "|" + "---|" * 9
    for name, said in NAMES.items():
        if "measured_graph" in rows.get(name, {}):
            yield _step(said, rows[name])
    later = {n: r for n, r in rows.items() if "error_later" in r}
    if later:
        yield ""
        yield "| step | eager: before | beside the graph | later | off by it: beside | later | before |"
        yield "|" + "---|" * 7
        yield from (_readings(said, later[name]) for name, said in NAMES.items() if name in later)
    modules = [(n, p, m) for n in NAMES for p, m in rows.get(n, {}).get("modules", {}).items() if _measured(m)]
    if modules:
        yield ""
        yield "| module captured, the rest of the step eager | gain of the step: projected | measured | off |"
        yield "|" + "---|" * 4
        yield from (_module(NAMES[n], path, m) for n, path, m in modules)


def _step(said: str, row: dict[str, Any]) -> str:
    cells = [
        said,
        f"{row['launch_bound_share']:.0%}",
        row["verdict"],
        time(row["eager"]),
        time(row["projected_graph"]),
        time(row["measured_graph"]),
        f"{row['projected']:.2f}",
        f"{row['measured']:.2f}" + _span(row.get("measured_range")),
        f"{row['error']:+.1%}",
    ]
    return f"| {' | '.join(cells)} |"


def _readings(said: str, row: dict[str, Any]) -> str:
    walls = [row["before"]["eager"], row["eager"], row["later"]["eager"]]
    errors = [row["error"], row["error_later"], row["error_before"]]
    return f"| {' | '.join([said, *map(time, walls), *(f'{e:+.1%}' for e in errors)])} |"


def _module(said: str, path: str, m: dict[str, Any]) -> str:
    projected, measured = m["step_gain"], m["measured_step_gain"]
    off = projected / measured - 1
    return f"| `{path}` of {said} | {projected:.2f} | {measured:.2f}{_span(m.get('step_range'))} | {off:+.1%} |"


def _measured(m: dict[str, Any]) -> bool:
    return bool(m.get("measured_step_gain"))


def _span(span: list[float] | None) -> str:
    return f" ({span[0]:.2f} to {span[1]:.2f})" if span else ""


if __name__ == "__main__":
    main()
