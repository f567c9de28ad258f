"""Which modules to capture, and which to leave out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from graphlint.runtime.profiling.costs import ReplayCosts
from graphlint.runtime.profiling.launches import Attribution, Launch
from graphlint.runtime.profiling.model import simulate, whole_step
from graphlint.runtime.profiling.report import Choice, Module
from graphlint.runtime.profiling.steps import Iteration
from graphlint.runtime.profiling.timeline import RangeKind, module_name

WORTH = 0.10  # launch share below which a graph is not worth it
FIRST = 0.25  # ... and above which it comes first
FEW_NODES = 8  # a graph of fewer kernels costs about what it saves
_MOST = 300  # modules that are worked out one by one, those with the most kernels
_SMALL_GAIN = 1.01


@dataclass
class _Node:
    """A module in the tree of paths, with everything below it."""

    path: str
    kind: str = ""
    nodes: int = 0
    host: float = 0.0
    device: float = 0.0
    waits: list[str] = field(default_factory=list)
    children: list[str] = field(default_factory=list)


def modules(
    sequence: Sequence[Launch], step: Iteration, changing: set[str], costs: ReplayCosts, host_scale: float
) -> tuple[Module, ...]:
    """Every module that launches work, in order of the tree, each with a choice and its reason.

    Args:
        sequence: launches of the typical step.
        step: that step.
        changing: modules whose shapes change from step to step.
        host_scale: how much faster the host is without the profiler.
    """
    tree = _tree(sequence, step, host_scale)
    if not tree:
        return ()
    eager = simulate(sequence, costs, host_scale)
    worked_out = set(sorted(tree, key=lambda p: -tree[p].nodes)[:_MOST])
    gains = {path: eager / simulate(sequence, costs, host_scale, _Group(path)) for path in worked_out}
    gains |= {path: 1.0 for path in tree if path not in worked_out}
    rows: list[Module] = []
    for root in sorted(p for p in tree if _parent(p) not in tree):
        _choose(root, tree, changing, gains, costs, rows, inside=False)
    return tuple(rows)


def together(sequence: Sequence[Launch], rows: Iterable[Module], costs: ReplayCosts, host_scale: float) -> float:
    """How many times faster the step is with all chosen modules captured, each as its own graph."""
    chosen = [r.path for r in rows if r.choice is Choice.CAPTURE]

    def group(launch: Launch) -> str | None:
        return next((p for p in chosen if _covers(p, launch.path)), None)

    return simulate(sequence, costs, host_scale) / simulate(sequence, costs, host_scale, group)


def changing_paths(steps: Sequence[Iteration]) -> set[str]:
    """What launches different kernels or launch dimensions from step to step: modules, all modules around them, and
    operators where they lie outside modules.
    """
    if len(steps) < 2:
        return set()
    shapes = [_shapes(step) for step in steps]
    every = set().union(*shapes)
    changed = {p for p in every if any(s.get(p) != shapes[0].get(p) for s in shapes[1:])}
    return {ancestor for p in changed for ancestor in _lineage(p)}


def _shapes(step: Iteration) -> dict[str, Counter[tuple[str, tuple[int, ...]]]]:
    launched = {c.correlation: c for c in step.calls if c.correlation is not None}
    where = Attribution(step)
    found: dict[str, Counter[tuple[str, tuple[int, ...]]]] = {}
    for op in step.ops:
        call = launched.get(op.correlation) if op.correlation is not None else None
        path, _, operator = where(call) if call else ("", False, "")
        place = operator if path.startswith("(") else path
        found.setdefault(place, Counter())[op.name, op.grid] += 1
    return found


def _tree(sequence: Sequence[Launch], step: Iteration, host_scale: float) -> dict[str, _Node]:
    kinds = dict(module_name(r.name) for r in step.ranges if r.kind is RangeKind.MODULE)
    tree: dict[str, _Node] = {}
    for launch in sequence:
        if launch.path.startswith("("):
            continue
        for path in _lineage(launch.path):
            node = tree.setdefault(path, _Node(path, kinds.get(path, "")))
            node.nodes += launch.nodes
            node.host += (launch.before + launch.call) * host_scale
            node.device += launch.device
            if launch.waits:
                node.waits.append(launch.operator or launch.name)
    for path in tree:
        if _parent(path) in tree:
            tree[_parent(path)].children.append(path)
    return tree


def _choose(
    path: str,
    tree: dict[str, _Node],
    changing: set[str],
    gains: dict[str, float],
    costs: ReplayCosts,
    rows: list[Module],
    inside: bool,
) -> None:
    node = tree[path]
    share = max(0.0, 1 - node.device / node.host) if node.host else 0.0
    choice, reason = Choice.INSIDE, ""
    if not inside:
        choice, reason = _verdict(node, _heavy(node, tree), share, path in changing, gains[path])
    alone = whole_step(node.device, node.nodes, costs)
    rows.append(
        Module(path, node.kind, node.nodes, node.host, node.device, share, gains[path], choice, reason, projected=alone)
    )
    for child in sorted(node.children, key=_natural):
        _choose(child, tree, changing, gains, costs, rows, inside or choice is not Choice.OPEN)


def _heavy(node: _Node, tree: dict[str, _Node]) -> list[str]:
    """Parts that keep the device busy and make up much of the module's work: they gain nothing in its graph."""
    parts = (tree[c] for c in node.children)
    return [p.path for p in parts if p.host < p.device * (1 + WORTH) and p.device > FIRST * node.device]


def _verdict(node: _Node, heavy: list[str], share: float, changes: bool, gain: float) -> tuple[Choice, str]:
    """Reasons are read after the module's name."""
    closed = Choice.OPEN if node.children else Choice.LEAVE
    if node.waits:
        return closed, f"waits for the device in {', '.join(sorted(set(node.waits)))}"
    if changes:
        return closed, "launches different kernels or shapes from step to step"
    if not node.kind and node.children:
        return Choice.OPEN, "is a container that is never called itself"
    if node.nodes < FEW_NODES:
        return Choice.LEAVE, f"has {node.nodes} kernels: one graph launch costs about as much"
    if share < WORTH:
        return Choice.LEAVE, f"keeps the device busy {1 - share:.0%} of its time"
    if heavy and len(heavy) < len(node.children):
        return Choice.OPEN, f"holds a compute-bound part: {', '.join(heavy)}"
    if gain < _SMALL_GAIN:
        return Choice.LEAVE, "hides its launches behind device work of other parts"
    return Choice.CAPTURE, f"leaves the device idle {share:.0%} of its time"


@dataclass(frozen=True, slots=True)
class _Group:
    """Puts the launches of one module, forward and backward apart, into graphs."""

    path: str

    def __call__(self, launch: Launch) -> str | None:
        return f"{self.path}{launch.backward}" if _covers(self.path, launch.path) else None


def _covers(path: str, other: str) -> bool:
    return other == path or other.startswith(path + ".")


def _lineage(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _natural(path: str) -> list[tuple[int, str]]:
    """`blocks.2` before `blocks.10`."""
    return [(int(p), "") if p.isdigit() else (0, p) for p in path.split(".")]
