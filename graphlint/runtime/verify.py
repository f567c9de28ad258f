"""The last phase: is a replay what eager is? Nothing is assumed; each stage says what it compared and what it could
not.

Eager and graph run in lockstep, each from its own copy of the state, on inputs that change from step to step. The
first tensor that differs by more than eager differs from itself is named, with the step and the likely cause.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from graphlint.runtime.backend import GraphBackend
from graphlint.runtime.compare import Before, Difference, Tolerance, Values, copies, difference, noise
from graphlint.runtime.errors import CaptureError, PoolLeakError, Where, error_of
from graphlint.runtime.inputs import collapsed
from graphlint.runtime.replay import Captured
from graphlint.runtime.report import Proof
from graphlint.runtime.results import host_difference
from graphlint.runtime.spec import Spec, TensorSpec
from graphlint.runtime.state import Snapshot, State
from graphlint.runtime.warmup import Watched

LEAK_REPLAYS = 10
WORTH_CALLS = 5


@dataclass
class Trial:
    """One graph on trial.

    Args:
        eager: runs the user's function on the graph's buffers, on the capture stream; gives output leaves.
        base: the state from which everything starts, bound to the tensors that the graph knows.
        leaves: the call's leaves, private copies where the call changes them.
        tolerance: how close the replay must come.
    """

    captured: Captured
    eager: Callable[[list[Any]], list[Any]]
    state: State
    base: Snapshot
    backend: GraphBackend
    watched: Watched
    leaves: list[Any]
    spec: Spec
    room: int
    tolerance: Tolerance
    where: Where | None
    proofs: list[Proof] = field(default_factory=list)
    host_changes: list[str] = field(default_factory=list)
    prepare: Callable[[], None] = lambda: None  # sets gradients as a call finds them

    def run_eager(self, leaves: list[Any]) -> list[Any]:
        """One eager call on its own copy of what it changes."""
        self.prepare()
        return self.eager(leaves)

    def run_graph(self, leaves: list[Any]) -> list[Any]:
        """One replay."""
        self.prepare()
        return self.captured.run(leaves)

    def private(self, leaves: list[Any]) -> list[Any]:
        """Copies of the arguments that the call changes."""
        return private(leaves, self.captured.spec, self.captured.written)

    def note(self, stage: str, verdict: str, text: str) -> None:
        """One line of the report."""
        self.proofs.append(Proof(stage, verdict, text))

    def values(self, outputs: list[Any], leaves: list[Any]) -> Values:
        """Everything that can be compared: outputs, changed arguments and state."""
        named = {f"output[{i}]" if len(outputs) > 1 else "output": o for i, o in enumerate(outputs)}
        tensors = {label: t for label, t in named.items() if isinstance(t, torch.Tensor)}
        tensors.update({f"argument {self.captured.spec.names[i]}": leaves[i] for i in self.captured.written})
        tensors.update({k: v for k, v in self.state.tensors().items() if v.device == self.state.device})
        return tensors


def verify(trial: Trial, steps: int, deep: bool) -> None:
    """Runs the stages; `trial.base` is the state before and after.

    Raises:
        CaptureError: the replay is wrong (ReplayMismatchError and kin) or memory grows (PoolLeakError).
    """
    try:
        structure(trial)
        scribbled = scribble(trial.state.device)
        lockstep(trial, steps)
        del scribbled
        randomness(trial)
        if deep:
            missing_work(trial)
        memory(trial)
        worth(trial)
    finally:
        trial.base.restore()


def structure(trial: Trial) -> None:
    """What is in the graph, and on which streams the call worked."""
    counts = trial.captured.graph.node_counts()
    if counts:
        trial.note("structure", "proved", ", ".join(f"{n} {kind}" for kind, n in counts.items()))
    else:
        trial.note("structure", "skipped", "this torch does not show the nodes of a graph")
    if len(trial.watched.streams) > 1:
        others = [str(where) for where in list(trial.watched.streams.values())[1:] if where]
        trial.note("structure", "noted", f"works on {len(others)} more stream(s), from {', '.join(others)}")


def scribble(device: torch.device) -> list[torch.Tensor]:
    """Fills freed memory with NaN, so that a graph that reads it shows."""
    with torch.inference_mode(False), torch.no_grad():
        return [
            torch.full((n,), float("nan"), device=device) for n in (64, 512, 4096, 65536, 1 << 20) for _ in range(3)
        ]


def lockstep(trial: Trial, steps: int) -> None:
    """Eager and graph side by side over `steps` calls."""
    eager_state = graph_state = trial.base
    noises: dict[str, float] = {}
    bitwise, varied = True, False
    for step in range(1, steps + 1):
        leaves, changed = vary(trial.leaves, trial.spec, step)
        varied |= changed
        if step == 1:
            noises = _calibrate(trial, leaves)
        want = _side(trial, eager_state, leaves, step, steps, graph=False)
        have = _side(trial, graph_state, leaves, step, steps, graph=True)
        start = eager_state
        eager_state, graph_state = want.state, have.state
        began = functools.partial(state_before, start, trial.state)
        first, same = difference(want.values, have.values, noises, trial.tolerance, began)
        bitwise &= same
        if first is not None:
            raise _mismatch(trial, first, step, want.values, have.values)
        if frozen := host_difference(want.outputs, have.outputs):
            raise _error(trial, "frozen-scalar", f"at step {step} {frozen}")
        if not same and not trial.tolerance.exact:
            graph_state = eager_state  # rounding is not to grow from step to step
        if any(not torch.equal(a, b) for a, b in zip(want.random, have.random, strict=True)):
            raise _error(trial, "frozen-rng", f"after step {step} the generators stand elsewhere than after eager")
    how = "bitwise" if bitwise else trial.tolerance.words
    inputs = "inputs changed from step to step" if varied else "integer inputs left as they are"
    trial.note("replay against eager", "proved", f"{steps} step(s) equal, {how}; {inputs}")
    trial.note("poison", "proved", "buffers held NaN before each step, freed memory too")


class Side(NamedTuple):
    """One step of one side: its tensors, its output leaves, the generators' states, and where it stands afterwards."""

    values: Values
    outputs: list[Any]
    random: list[torch.Tensor]
    state: Snapshot


def _side(trial: Trial, start: Snapshot, leaves: list[Any], step: int, steps: int, graph: bool) -> Side:
    start.restore()
    if steps >= 4 and step == steps // 2 + 1:
        _halve_lr(trial.state)
    leaves = trial.private(leaves)
    if graph:
        trial.captured.static.poison()
    outputs = trial.run_graph(leaves) if graph else trial.run_eager(leaves)
    values = copies(trial.values(outputs, leaves))
    random = [gen.get_state() for gen in trial.state.generators]
    plain = [None if isinstance(out, torch.Tensor) else out for out in outputs]
    return Side(values, plain, random, trial.state.snapshot(trial.room))


def state_before(start: Snapshot, state: State) -> Before:
    """What the state was when a call began, copied; the state is left so."""
    start.restore()
    return Before(copies(state.tensors()), state.kinds())


def _calibrate(trial: Trial, leaves: list[Any]) -> dict[str, float]:
    """What eager differs from itself."""
    runs = []
    for _ in range(2):
        trial.base.restore()
        mine = trial.private(leaves)
        runs.append(copies(trial.values(trial.run_eager(mine), mine)))
    return {label: apart for label, apart in noise(*runs).items() if apart}


def vary(leaves: list[Any], spec: Spec, step: int) -> tuple[list[Any], bool]:
    """Other inputs of the same kind: floating-point tensors are shifted and scaled; integers may be indices and are
    left.
    """
    out, changed = list(leaves), False
    with torch.no_grad():
        for i in spec.tensor_indices:
            leaf = leaves[i]
            if spec.aliases[i] != i:
                out[i] = out[spec.aliases[i]]
            elif step > 1 and leaf.is_floating_point() and leaf.numel():
                kind = spec.leaves[i]
                index = collapsed(kind) if isinstance(kind, TensorSpec) else None
                small = leaf.detach() if index is None else leaf.detach()[index]
                moved = small.roll(step - 1) if small.dim() else small
                out[i] = (moved * (1.0 - 0.0625 * (step % 8))).to(leaf.dtype).expand(leaf.shape)
                changed = True
    return out, changed


def private(leaves: list[Any], spec: Spec, written: list[int]) -> list[Any]:
    """Copies of the arguments that a call changes; what was one tensor stays one."""
    out = list(leaves)
    for i in spec.tensor_indices:
        out[i] = leaves[i].detach().clone() if i in written else out[spec.aliases[i]]
    return out


def _halve_lr(state: State) -> None:
    """In the middle of a long run the learning rate changes, as a scheduler would do it."""
    for optimizer in state.found.optimizers.values():
        for group in optimizer.param_groups:
            if isinstance(group.get("lr"), torch.Tensor):
                group["lr"].mul_(0.5)


def randomness(trial: Trial) -> None:
    """Two replays of the same inputs must differ exactly where two eager calls do."""
    if not trial.watched.draws:
        trial.note("random numbers", "skipped", "the call draws none")
        return
    fresh = []
    for run in (trial.run_eager, trial.run_graph):
        trial.base.restore()
        mine = trial.private(trial.leaves)
        first = copies(trial.values(run(mine), mine))
        before = [gen.get_state() for gen in trial.state.generators]
        trial.base.write_bytes()
        for gen, state in zip(trial.state.generators, before, strict=True):
            gen.set_state(state)
        mine = trial.private(trial.leaves)
        second = copies(trial.values(run(mine), mine))
        fresh.append({label for label, apart in noise(first, second).items() if apart})
    if fresh[0] and not fresh[1]:
        raise _error(trial, "frozen-rng", "two replays give the same random numbers where two eager calls do not")
    if not fresh[0]:
        trial.note("random numbers", "skipped", "two eager calls agree: nothing random reaches a result")
        return
    trial.note(
        "random numbers", "proved", f"fresh on each replay, generators advance as in eager ({len(fresh[1])} tensors)"
    )


def missing_work(trial: Trial) -> None:
    """Counts kernels of an eager call and of a replay."""
    trial.base.restore()
    eager = trial.backend.kernels(lambda: trial.run_eager(trial.leaves), trial.state.device)
    trial.base.restore()
    replay = trial.backend.kernels(lambda: trial.run_graph(trial.leaves), trial.state.device)
    if eager is None or replay is None:
        trial.note("missing work", "skipped", "kernels can't be counted here")
        return
    lost = {name: n - replay.get(name, 0) for name, n in eager.items() if n > replay.get(name, 0) and "Mem" not in name}
    if lost:
        name, count = next(iter(lost.items()))
        trial.note("missing work", "noted", f"eager launches `{name[:60]}` {count} more time(s) than the replay")
    else:
        trial.note("missing work", "proved", f"all {sum(eager.values())} kernels of eager are in the replay")


def memory(trial: Trial) -> None:
    """Replays must not allocate."""
    trial.base.restore()
    device, backend = trial.state.device, trial.backend
    trial.run_graph(trial.leaves)
    backend.synchronize(device)
    before = backend.allocated(device)
    for _ in range(LEAK_REPLAYS):
        trial.run_graph(trial.leaves)
    backend.synchronize(device)
    grown = backend.allocated(device) - before
    if grown > 0:
        raise PoolLeakError(
            f"{grown} bytes more are held after {LEAK_REPLAYS} replays", stage="verify", where=trial.where
        )
    trial.note("memory", "proved", f"flat over {LEAK_REPLAYS} replays")


def worth(trial: Trial) -> None:
    """How long an eager call takes and how long a replay."""
    if not trial.backend.times:
        trial.note("worth it", "skipped", "time means nothing on this backend")
        return
    times = []
    for run in (trial.run_eager, trial.run_graph):
        trial.base.restore()
        run(trial.leaves)
        trial.backend.synchronize(trial.state.device)
        start = time.perf_counter()
        for _ in range(WORTH_CALLS):
            run(trial.leaves)
        trial.backend.synchronize(trial.state.device)
        times.append((time.perf_counter() - start) / WORTH_CALLS * 1e6)
    trial.captured.report.eager_us, trial.captured.report.replay_us = times
    gain = times[0] / max(times[1], 1e-9)
    trial.note("worth it", "proved" if gain >= 1.05 else "noted", f"a replay is {gain:.2f} times as fast as eager")


def _mismatch(trial: Trial, first: Difference, step: int, want: Values, have: Values) -> CaptureError:
    """The first diverging step and tensor, and what most likely happened."""
    rule, cause = _cause(trial, first.label, step, want, have)
    return _error(trial, rule, f"at step {step} {first}; {cause}")


def _cause(trial: Trial, label: str, step: int, want: Values, have: Values) -> tuple[str, str]:
    if trial.captured.static.plan is not None and label.startswith("output"):
        return "padding-changes-result", "the padding takes part in the result"
    if trial.host_changes:
        return (
            "frozen-scalar",
            f"on the host `{trial.host_changes[0]}` changes with each call and is frozen in the graph",
        )
    trial.base.restore()
    old = trial.state.tensors().get(label)
    if old is not None and label in have and bool(torch.equal(old, have[label])):
        return "missing-work", "the graph leaves it untouched: that work ran on another stream or on the host"
    if trial.watched.draws:
        return "replay-mismatch", "random numbers are drawn; a draw outside the graph's generators is the likely cause"
    if step > 1:
        return "replay-mismatch", "a value of the first call (an address, a number) is most likely frozen"
    return "replay-mismatch", "the captured work is not the eager work"


def _error(trial: Trial, rule: str, reason: str) -> CaptureError:
    return error_of(rule)(reason, rule=rule, stage="verify", where=trial.where)
