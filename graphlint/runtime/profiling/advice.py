"""The advice: thresholds and words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from graphlint.runtime.profiling.modules import FIRST, WORTH
from graphlint.runtime.profiling.report import Advice, Choice, Module, Verdict, Whole

TRUSTED = 0.15  # projection and measurement may differ by that much
_NAMED = 4  # examples in a sentence


@dataclass(frozen=True, slots=True)
class Facts:
    """What the advice rests on."""

    whole: Whole
    waits: tuple[tuple[str, str], ...]  # operator or runtime call, and its module
    changing: Sequence[str]  # modules whose kernels change from step to step
    kernels_change: bool
    input_shapes: tuple[tuple[str, ...], ...]  # of each step's batch
    modules: tuple[Module, ...]
    together: float  # gain of the step with all chosen modules captured
    already: float  # share of the device work that graphs launch already
    stalled: float = 0.0  # microseconds of idle device with work in its queue
    collectives: float = 0.0  # microseconds of device time

    @property
    def inputs_change(self) -> bool:
        return len(set(self.input_shapes)) > 1


def advise(facts: Facts) -> Advice:
    """What to do about the step: below 10% of launch share nothing, above 25% a graph before anything else."""
    if facts.already > 0.5:
        return _graphed_already(facts)
    verdict = _verdict(facts.whole.share)
    points = [*_shapes(facts), *_waits(facts)]
    blocked = bool(points)
    if verdict is Verdict.NOT_WORTH:
        points = [*_modules(facts, blocked), *_elsewhere(facts)]
        return Advice(verdict, _headline(facts, verdict, blocked), tuple(points), blocked)
    points += [*_whole_step(facts, blocked), *_modules(facts, blocked), *_elsewhere(facts)]
    return Advice(verdict, _headline(facts, verdict, blocked), tuple(points), blocked)


def _graphed_already(facts: Facts) -> Advice:
    whole = facts.whole
    headline = (
        f"Graphed already: {facts.already:.0%} of the device work comes from graph launches. "
        f"The device still idles {whole.share:.0%} of the step, waiting for the host."
    )
    points = list(_waits(facts))
    if whole.share >= WORTH:
        points.append("What is left is host work around the graphs: put more of the step into one graph.")
    return Advice(Verdict.NOT_WORTH, headline, (*points, *_elsewhere(facts)))


def confirmed(advice: Advice, whole: Whole) -> Advice:
    """The advice after the measurement: the same, unless the capture failed or the projection was wrong."""
    if whole.graphed is None:
        failed = f"The step could not be captured as it is: {whole.failed}." if whole.failed else ""
        return replace(advice, points=(*advice.points, failed)) if failed else advice
    if abs(whole.prediction_error or 0.0) <= TRUSTED:
        return advice
    said = (
        f"The measured gain, {whole.wall / whole.graphed:.2f}, is not the projected one, {whole.gain:.2f}: "
        "trust the measurement."
    )
    return replace(advice, points=(said, *advice.points))


def time(us: float) -> str:
    """A time as people say it."""
    if us < 1000:
        return f"{us:.1f} µs" if us < 9.95 else f"{us:.0f} µs"
    return f"{us / 1e3:.2f} ms" if us < 1e5 else f"{us / 1e3:.0f} ms"


def _verdict(share: float) -> Verdict:
    if share < WORTH:
        return Verdict.NOT_WORTH
    return Verdict.FIRST if share > FIRST else Verdict.EASY


def _headline(facts: Facts, verdict: Verdict, blocked: bool) -> str:
    share, gain = f"The device idles {facts.whole.share:.0%} of the step, waiting for the host", facts.whole.gain
    if verdict is Verdict.NOT_WORTH:
        return f"Not worth a CUDA graph. {share}; even a perfect graph saves no more."
    if verdict is Verdict.EASY:
        return f"Worth a CUDA graph if it is easy. {share}; a graph makes the step {gain:.2f} times faster."
    if blocked:
        return f"Do this first, but it can't be captured yet. {share}; a graph would be {gain:.1f} times faster."
    return f"Do this first. {share}; a graph makes the step {gain:.1f} times faster."


def _shapes(facts: Facts) -> list[str]:
    """A graph repeats one set of shapes."""
    if facts.inputs_change:
        seen = _examples([_changed_input(s, facts.input_shapes) for s in facts.input_shapes])
        return [
            f"The inputs change shape from batch to batch ({seen}), and a graph repeats the shapes of its capture. "
            f"Pad them to one size and mask what is padding; or bucket them{_buckets(facts)}, a graph for each bucket; "
            "or leave this step to torch.compile, which fuses kernels without a fixed size."
        ]
    if facts.kernels_change:
        named = sorted(filter(None, _leaves(facts.changing)), key=lambda p: ("Backward" in p, p))
        where = f" in {_examples(named)}" if named else ""
        return [
            f"Kernels or their sizes change from step to step{where}: a size comes from data. "
            "Pad it to one size and mask the rest, bucket it with a graph for each bucket, "
            "or leave this part to torch.compile."
        ]
    return []


def _changed_input(shapes: tuple[str, ...], all_shapes: Sequence[tuple[str, ...]]) -> str:
    changed = [i for i in range(len(shapes)) if len({s[i] for s in all_shapes if i < len(s)}) > 1]
    return " and ".join(shapes[i] for i in changed) or f"{len(shapes)} tensors"


def _buckets(facts: Facts) -> str:
    """Powers of two that cover the sizes seen, where one dimension changes."""
    sizes = {n for s in facts.input_shapes for n in _numbers(_changed_input(s, facts.input_shapes))}
    fixed = set.intersection(*({*_numbers(_changed_input(s, facts.input_shapes))} for s in facts.input_shapes))
    changing = sorted(sizes - fixed)
    if not changing:
        return ""
    powers = sorted({1 << max(0, n - 1).bit_length() for n in changing})
    return f" ({', '.join(map(str, powers))} cover what was seen)" if len(powers) <= 6 else ""


def _numbers(shape: str) -> list[int]:
    return [int(n) for part in shape.split(" and ") for n in part.split("x") if n.isdigit()]


def _waits(facts: Facts) -> list[str]:
    if not facts.waits:
        return []
    named = [f"{what} in {where}" if not where.startswith("(") else what for what, where in facts.waits]
    return [
        f"The host waits for the device in every step ({_examples(named)}), which a capture forbids. "
        "Keep the value on the device, or read it after the step and not in every one."
    ]


def _whole_step(facts: Facts, blocked: bool) -> list[str]:
    whole = facts.whole
    cost = f"{whole.nodes} device operations cost the host {time(whole.host)}"
    said = f"{cost}; as one graph the step takes {time(whole.projected)}"
    if blocked:
        return [f"Then capture the whole step: {said}."]
    return [f"Capture the whole step, forward, backward and optimizer in one graph: {said}."]


def _modules(facts: Facts, blocked: bool) -> list[str]:
    chosen = [m for m in facts.modules if m.choice is Choice.CAPTURE]
    left = [m for m in facts.modules if m.choice is Choice.LEAVE and m.reason.startswith("keeps")]
    points = []
    if chosen and facts.together > 1.01:
        begin = "Until then, or if" if blocked else "If"
        points.append(
            f"{begin} the whole step can't be one graph: capture {_grouped(chosen)}, "
            f"which makes the step {facts.together:.2f} times faster."
        )
    if left:
        points.append(f"Leave out {_grouped(left)}: compute-bound, a graph would only add copies and memory.")
    return points


def _elsewhere(facts: Facts) -> list[str]:
    whole, points = facts.whole, []
    if whole.fetch > WORTH * whole.wall:
        points.append(
            f"Fetching a batch takes the host {time(whole.fetch)} beside each step, which no graph removes: "
            "fetch ahead, in worker processes or on another thread."
        )
    if facts.stalled > WORTH * whole.wall:
        points.append(
            f"For {time(facts.stalled)} of the step the device idled with work in its queue: another stream, a copy, or "
            "clocks that disagree. A graph may not remove that."
        )
    if facts.collectives > WORTH * whole.device:
        points.append(
            f"{facts.collectives / whole.device:.0%} of the device time are collectives, which may be waiting for other "
            "ranks; a graph makes no rank wait less for the slowest one."
        )
    if whole.outside > WORTH * whole.wall:
        points.append(
            f"The device also idles {whole.outside / whole.wall:.0%} of the time between steps or while a batch is "
            "fetched, which no graph removes: look at data loading and logging."
        )
    if _verdict(whole.share) is Verdict.NOT_WORTH:
        points.append("To make this step faster, make its kernels faster: fusion, lower precision, larger tiles.")
    return points


def _grouped(rows: Sequence[Module]) -> str:
    """`model.blocks.0 to model.blocks.5 (6 x Block)`."""
    groups: dict[tuple[str, str], list[Module]] = {}
    for m in rows:
        groups.setdefault((m.path.rpartition(".")[0], m.kind), []).append(m)
    said = []
    for (_, kind), members in groups.items():
        if len(members) == 1:
            said.append(members[0].path)
        else:
            said.append(f"{members[0].path} to {members[-1].path} ({len(members)} x {kind})")
    return _examples(said)


def _leaves(paths: Sequence[str]) -> list[str]:
    return [p for p in paths if not any(q.startswith(p + ".") for q in paths)]


def _examples(items: Sequence[str]) -> str:
    distinct = list(dict.fromkeys(items))
    more = f" and {len(distinct) - _NAMED} more" if len(distinct) > _NAMED else ""
    return ", ".join(distinct[:_NAMED]) + more
