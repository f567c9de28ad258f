"""What a guard did and what it proved, for people and for programs: text, JSON, dict, and SARIF of what it refused."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

MARKS = {"proved": "ok ", "skipped": "-- ", "noted": "!! ", "failed": "XX "}


@dataclass(frozen=True)
class Proof:
    """One stage of verification: `verdict` is "proved", "skipped", "noted" or "failed"; `text` says what was
    compared.
    """

    stage: str
    verdict: str
    text: str


@dataclass
class GraphReport:
    """One graph: what call it serves, what it holds, what was proved about it."""

    call: str
    nodes: dict[str, int] = field(default_factory=dict)
    replays: int = 0
    input_bytes: int = 0
    copied: list[str] = field(default_factory=list)
    watched: str = ""
    proofs: list[Proof] = field(default_factory=list)
    eager_us: float = 0.0
    replay_us: float = 0.0


@dataclass
class Fallback:
    """Calls that ran eagerly although a graph was wanted: why, and how many."""

    reason: str
    calls: int = 0


@dataclass
class CaptureReport:
    """Everything that `guard.report()` knows. `str(report)` is for people, `to_json()` and `to_dict()` for programs."""

    name: str
    mode: str
    device: str
    graphs: list[GraphReport]
    fallbacks: list[Fallback]
    notes: list[str]
    stats: dict[str, int]
    memory: dict[str, int]
    source: str = ""
    faults: list[dict[str, object]] = field(
        default_factory=list
    )  # what was refused, as `CaptureError.to_dict` gives it

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers."""
        return asdict(self)

    def to_json(self, indent: int | None = 2) -> str:
        """The same as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)

    def to_sarif(self, base: str = "") -> str:
        """The faults as SARIF 2.1.0, with URIs relative to the folder `base`; needs the linter's msgspec."""
        from graphlint.runtime.sarif import sarif_of

        return sarif_of(self.faults, base)

    @property
    def proved(self) -> bool:
        """Whether at least one graph stands and no stage of any graph failed."""
        verdicts = [proof.verdict for graph in self.graphs for proof in graph.proofs]
        return bool(self.graphs) and "failed" not in verdicts and "proved" in verdicts

    def __str__(self) -> str:
        lines = [f"{self.name}: mode {self.mode}, {self.device or 'no device yet'}, {len(self.graphs)} graph(s)"]
        for graph in self.graphs:
            lines.extend(_graph_lines(graph))
        for fault in self.faults:
            place = f" ({fault['filename']}:{fault['row']})" if fault["filename"] else ""
            lines.append(f"  refused: {fault['code']} {fault['name']}: {fault['message']}{place}")
        for fallback in self.fallbacks:
            lines.append(f"  eager {fallback.calls} times: {fallback.reason}")
        lines.extend(f"  note: {note}" for note in self.notes)
        lines.append("  " + ", ".join(f"{key} {value}" for key, value in self.stats.items()))
        lines.append("  memory: " + ", ".join(f"{key} {_size(value)}" for key, value in self.memory.items()))
        return "\n".join(lines)


def _graph_lines(graph: GraphReport) -> list[str]:
    nodes = ", ".join(f"{count} {kind}" for kind, count in graph.nodes.items())
    lines = [f"  graph for {graph.call}" + (f" ({nodes})" if nodes else "")]
    copied = ", ".join(graph.copied) or "nothing"
    lines.append(f"    {graph.replays} replays; copies {copied} ({_size(graph.input_bytes)})")
    lines.append(f"    {graph.watched}")
    if graph.replay_us:
        lines.append(
            f"    eager {graph.eager_us:.0f} us, replay {graph.replay_us:.0f} us: "
            f"{graph.eager_us / graph.replay_us:.2f} times as fast"
        )
    lines.extend(f"    {MARKS[proof.verdict]}{proof.stage}: {proof.text}" for proof in graph.proofs)
    return lines


def _size(count: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count = count / 1024  # type: ignore[assignment]
    return f"{count:.2f} GiB"
