"""What a step would take if parts of it were graphs: a small model of one host feeding one device.

The host works through its launches; the device works through what was launched, in order. A captured part costs the
host one graph launch instead of all its launches, and the device its kernels with the short gaps of a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from graphlint.runtime.profiling.costs import ReplayCosts
from graphlint.runtime.profiling.launches import Launch
from graphlint.runtime.profiling.timeline import Microseconds

Captured = Callable[[Launch], str | None]  # the graph that a launch goes into, None for none
Action = tuple[float, float, bool]  # host time, device time, waits for the device afterwards


def whole_step(device: Microseconds, nodes: int, costs: ReplayCosts) -> Microseconds:
    """Wall time of a step replayed as one graph, over and over: the slower of host and device."""
    return max(costs.host_replay(nodes), device + nodes * costs.node_gap)


def simulate(
    sequence: Sequence[Launch], costs: ReplayCosts, host_scale: float = 1.0, captured: Captured | None = None
) -> Microseconds:
    """Wall time of one step in the steady state of a loop.

    Args:
        sequence: the step's launches in order.
        host_scale: how much faster the host is without the profiler that recorded it.
        captured: which launches a graph replaces; each unbroken run with one name is one graph.
    """
    actions = _actions(sequence, costs, host_scale, captured)
    host = device = finished = previous = 0.0
    for _ in range(4):  # the third and fourth pass are the steady state
        for on_host, on_device, waits in actions:
            host += on_host
            if on_device:
                device = max(host + costs.launch_latency, device) + on_device
            if waits:
                host = max(host, device)
        previous, finished = finished, max(host, device)
    return finished - previous


def fit(sequence: Sequence[Launch], costs: ReplayCosts, wall: Microseconds, guess: float) -> float:
    """The host scale with which the model takes `wall` for the eager step.

    In a launch-bound loop the wall time is the best measure of the host; in a device-bound one it says nothing about
    the host, and the guess stays.
    """
    if wall <= 1.02 * simulate(sequence, costs, 0.0):
        return guess
    low, high = 0.0, max(1.5, 2 * guess)
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if simulate(sequence, costs, middle) < wall else (low, middle)
    return high


def _actions(
    sequence: Sequence[Launch], costs: ReplayCosts, host_scale: float, captured: Captured | None
) -> list[Action]:
    """(host time, device time, waits) of each thing the host does."""
    actions: list[Action] = []
    run: list[Launch] = []
    held: list[Launch] = []  # gradient accumulation runs eagerly, after the graph that it interrupts
    name: str | None = None

    def close() -> None:
        if run:
            actions.append(_replay(run, costs, host_scale))
        for launch in held:
            actions.extend(_eager(launch, costs, host_scale))
        run.clear()
        held.clear()

    for launch in sequence:
        group = captured(launch) if captured is not None else None
        if run and group is None and "AccumulateGrad" in launch.operator:
            held.append(launch)
            continue
        if group != name:
            close()
            name = group
        if group is None:
            actions.extend(_eager(launch, costs, host_scale))
        else:
            run.append(launch)
    close()
    return actions


def _eager(launch: Launch, costs: ReplayCosts, host_scale: float) -> list[Action]:
    on_host = (launch.before + launch.call) * host_scale
    on_device = launch.device + costs.eager_gap if launch.nodes else 0.0
    if not launch.waits:
        return [(on_host, on_device, False)]
    return [(on_host, on_device, False), (0.0, 0.0, True)]


def _replay(run: Sequence[Launch], costs: ReplayCosts, host_scale: float) -> Action:
    """One graph for the run. What the host did before its first launch may lie outside the module, so it stays."""
    nodes = sum(launch.nodes for launch in run)
    on_host = run[0].before * host_scale + costs.module_call + costs.replay_per_node * nodes
    return on_host, sum(launch.device for launch in run) + nodes * costs.node_gap, False
