"""The comparison of two training runs, as plain values: tolerance, first divergence, reasons, curves as text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import msgspec

_NOISE = 4.0  # a difference this many times what eager differs from itself is not noise
_STATE_RTOL = 1e-6  # relative difference of a tensor's norm that is worth naming
_NAMED = 5
_NOISY = 0.01  # difference of two eager runs, as a part of the loss, that hides what is looked for
_SHOWN = 10  # steps of the table, beside those around the divergence
_COLUMNS, _ROWS = 72, 14


@dataclass(frozen=True, slots=True)
class Curves:
    """One run: a loss for each step, and the norms of its state after it."""

    losses: tuple[float, ...]
    norms: tuple[tuple[float, ...], ...] = ()  # [step][tensor]
    names: tuple[str, ...] = ()
    rates: tuple[tuple[float, ...], ...] = ()  # learning rates that are Python numbers, before each step
    on_host: bool = False  # the loss was a Python number


@dataclass(frozen=True, slots=True)
class ParityReport:
    """Whether a graphed run equals an eager one."""

    eager: tuple[float, ...]
    graphed: tuple[float, ...]
    allowed: tuple[float, ...]  # difference of the losses at each step that counts as equal
    noise: float  # largest difference between two eager runs
    bitwise: int  # steps from the start whose losses are equal to the last bit
    diverged: int | None  # first step whose losses differ by more than allowed
    first_state: tuple[int, tuple[str, ...]] | None  # first step after which tensors differ, and those that differ most
    reasons: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """No step differs by more than eager may."""
        return self.diverged is None

    @property
    def steps(self) -> int:
        return len(self.eager)

    def to_json(self) -> str:
        """The report as JSON. A loss that is no number is null."""
        return msgspec.json.format(msgspec.json.encode(asdict(self) | {"ok": self.ok}), indent=2).decode()

    def to_text(self) -> str:
        """The report for a terminal, with both curves."""
        return "\n".join(line.rstrip() for line in _lines(self)) + "\n"

    def __str__(self) -> str:
        return self.to_text()


def compare(eager: Curves, again: Curves, graphed: Curves, rtol: float, changed: Sequence[str] = ()) -> ParityReport:
    """Judges a graphed run by two eager ones from the same state.

    Args:
        changed: plain host values that an eager run changed.
    """
    noise = [
        abs(a - b) if math.isfinite(a) and math.isfinite(b) else 0.0
        for a, b in zip(eager.losses, again.losses, strict=True)
    ]
    worst, allowed = 0.0, []
    for value, own in zip(eager.losses, noise, strict=True):
        worst = max(worst, own)
        allowed.append(_NOISE * worst + rtol * (abs(value) if math.isfinite(value) else 1.0))
    pairs = list(zip(eager.losses, graphed.losses, strict=True))
    diverged = next((i for i, (e, g) in enumerate(pairs) if not _close(e, g, allowed[i])), None)
    bitwise = next((i for i, (e, g) in enumerate(pairs) if not _same(e, g)), len(pairs))
    state = _first_state(eager, again, graphed)
    reasons = _reasons(eager, graphed, diverged, changed) if diverged is not None else ()
    return ParityReport(eager.losses, graphed.losses, tuple(allowed), worst, bitwise, diverged, state, tuple(reasons))


def _same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


def _close(a: float, b: float, allowed: float) -> bool:
    return _same(a, b) or abs(a - b) <= allowed


def _first_state(eager: Curves, again: Curves, graphed: Curves) -> tuple[int, tuple[str, ...]] | None:
    """The first step whose tensors differ by more than two eager runs do."""
    if eager.names != graphed.names or not eager.norms:
        return None
    for step, (e, a, g) in enumerate(zip(eager.norms, again.norms, graphed.norms, strict=False)):
        off = [
            (abs(y - x) / max(abs(x), 1e-30), _NOISE * abs(z - x) / max(abs(x), 1e-30), n)
            for x, z, y, n in zip(e, a, g, eager.names, strict=False)
        ]
        beyond = sorted((-d, n) for d, own, n in off if d > max(own, _STATE_RTOL))
        if beyond:
            return step, tuple(n for _, n in beyond[:_NAMED])
    return None


def _reasons(eager: Curves, graphed: Curves, diverged: int, changed: Sequence[str]) -> Iterator[str]:
    """What the curves themselves say about the cause."""
    constant = len(set(graphed.losses)) == 1 and len(set(eager.losses)) > 1
    if constant and graphed.on_host:
        yield "the graphed loss is a Python number of the capture and never changes; return the tensor (frozen-scalar)"
    elif constant:
        yield (
            "the graphed loss never changes: the graph reads inputs that are not refilled, or its update is lost "
            "(rebound-input, partial-refill)"
        )
    moved = next((i for i, r in enumerate(eager.rates) if _moved(r, eager.rates[0])), None)
    if moved is not None and moved <= diverged + 1:
        yield (
            f"the learning rate is a Python number and changes before step {moved}; a graph keeps the one of its "
            "capture: make it a tensor and fill it (frozen-lr)"
        )
    if changed:
        named = ", ".join(list(changed)[:_NAMED])
        yield f"an eager step changes {named} on the host, which no replay repeats (unrepeated-effect, frozen-scalar)"
    if diverged == 0 and not constant:
        yield "the very first step differs: the graph computes something else, not only later (verify with the guard)"


def _moved(now: tuple[float, ...], then: tuple[float, ...]) -> bool:
    return any(not _same(a, b) for a, b in zip(now, then, strict=False))


def _lines(report: ParityReport) -> Iterator[str]:
    if report.diverged is None:
        yield f"Parity: {report.steps} graphed steps equal {report.steps} eager ones ({_equality(report)})."
    else:
        e, g = report.eager[report.diverged], report.graphed[report.diverged]
        yield f"No parity: step {report.diverged} of {report.steps} differs, eager {e:.6g} and graphed {g:.6g}"
        yield f"({_equality(report)}; {report.allowed[report.diverged]:.2g} would be allowed)."
    if report.first_state is not None and not report.ok:
        step, names = report.first_state
        yield f"First to differ, after step {step}: {', '.join(names)}."
    yield from _cautions(report)
    yield ""
    yield from plot(report.eager, report.graphed, report.diverged)
    yield ""
    yield from _table(report)
    for reason in report.reasons:
        yield f"why: {reason}"


def _cautions(report: ParityReport) -> Iterator[str]:
    """What the comparison can't see."""
    odd = next((i for i, value in enumerate(report.eager) if not math.isfinite(value)), None)
    if odd is not None:
        yield f"note: the eager loss itself is {report.eager[odd]} at step {odd}: find out why before trusting a graph."
    usual = sorted(abs(value) for value in report.eager if math.isfinite(value))
    if usual and report.noise > _NOISY * usual[len(usual) // 2]:
        yield (
            f"note: two eager runs differ by {report.noise:.2g} themselves, so that smaller faults of a graph stay "
            "unseen; torch.use_deterministic_algorithms(True) may help."
        )


def _equality(report: ParityReport) -> str:
    if report.bitwise == report.steps:
        return "to the last bit"
    if report.bitwise:
        return f"to the last bit up to step {report.bitwise - 1}"
    differences = [abs(a - b) for a, b in zip(report.eager, report.graphed, strict=True)]
    return f"largest difference {max(differences):.2g}, two eager runs differ by {report.noise:.2g}"


def _table(report: ParityReport) -> Iterator[str]:
    """First, last, some between, and the steps around the divergence."""
    wanted = {0, report.steps - 1, *range(0, report.steps, -(-report.steps // _SHOWN))}
    if report.diverged is not None:
        wanted |= {i for i in range(report.diverged - 1, report.diverged + 2) if 0 <= i < report.steps}
    yield f"{'step':>6} {'eager':>14} {'graphed':>14} {'difference':>12}"
    for i in sorted(wanted):
        e, g = report.eager[i], report.graphed[i]
        mark = "  <- first divergence" if i == report.diverged else ""
        yield f"{i:>6} {e:>14.6g} {g:>14.6g} {abs(e - g):>12.2g}{mark}"


def plot(eager: Sequence[float], graphed: Sequence[float], diverged: int | None = None) -> list[str]:
    """Both curves as text: `o` eager, `x` graphed, `*` both; the caret is the first divergence."""
    finite = [v for v in [*eager, *graphed] if math.isfinite(v)]
    if not finite:
        return ["(no finite loss to draw)"]
    low, high = min(finite), max(finite)
    span = (high - low) or 1.0
    columns = min(_COLUMNS, max(len(eager), 2))
    grid = [[" "] * columns for _ in range(_ROWS)]
    for values, mark in ((eager, "o"), (graphed, "x")):
        for i, value in enumerate(values):
            if math.isfinite(value):
                row = _ROWS - 1 - round((value - low) / span * (_ROWS - 1))
                column = _column(i, len(values), columns)
                grid[row][column] = "*" if grid[row][column] not in (" ", mark) else mark
    labels = {0: f"{high:.4g}", _ROWS - 1: f"{low:.4g}"}
    lines = [f"{labels.get(r, ''):>10} |{''.join(cells)}" for r, cells in enumerate(grid)]
    lines.append(f"{'':>10} +{'-' * columns}")
    if diverged is not None:
        lines.append(f"{'':>12}{'':>{_column(diverged, len(eager), columns)}}^ step {diverged}")
    lines.append(f"{'':>12}o eager   x graphed   * both")
    return lines


def _column(i: int, count: int, columns: int) -> int:
    return round(i / max(count - 1, 1) * (columns - 1))
