"""What a replay costs: the few numbers that the projection needs beside the recording."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReplayCosts:
    """Microseconds that graphs and launches cost on one machine.

    The defaults are measured (`benchmarks/results/profile_gain.json`); the recorder measures the machine at hand.
    """

    node_gap: float = 0.4  # device idle between two dependent nodes of a graph
    eager_gap: float = 1.8  # device idle between two kernels that were both enqueued in time
    replay: float = 10.0  # host time of one graph launch
    replay_per_node: float = 0.25  # ... and what each node adds
    module_call: float = 40.0  # host time of one graphed module's call: autograd wrapper, input copies, launch
    launch_latency: float = 4.0  # from the launch call to the start of a kernel on an idle device
    source: str = "defaults measured on NVIDIA H200, torch 2.11.0+cu130"

    def host_replay(self, nodes: int) -> float:
        """Host time of launching one graph with that many nodes."""
        return self.replay + self.replay_per_node * nodes
