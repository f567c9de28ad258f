"""What a captured graph is made of, asked of the driver: how many nodes of each kind."""

from __future__ import annotations

import ctypes
from collections import Counter
from typing import Any

# CUgraphNodeType of the driver's header
KINDS = {
    0: "kernel",
    1: "memcpy",
    2: "memset",
    3: "host",
    4: "child graph",
    5: "empty",
    6: "event wait",
    7: "event record",
    8: "semaphore signal",
    9: "semaphore wait",
    10: "alloc",
    11: "free",
    12: "memory operation",
    13: "conditional",
}


def node_counts(graph: Any, driver: Any) -> dict[str, int]:
    """Nodes by kind, the commonest first.

    Args:
        graph: a `torch.cuda.CUDAGraph` made with `keep_graph=True`, whose capture has ended.
        driver: the driver library as ctypes has it, or None.

    Returns:
        Empty where it can't be told: no driver library, a torch before 2.8, a graph that was not kept.
    """
    try:
        raw = ctypes.c_void_p(int(graph.raw_cuda_graph()))
    except (AttributeError, RuntimeError, TypeError):
        return {}
    count = ctypes.c_size_t()
    if driver is None or driver.cuGraphGetNodes(raw, None, ctypes.byref(count)):
        return {}
    nodes = (ctypes.c_void_p * count.value)()
    if driver.cuGraphGetNodes(raw, nodes, ctypes.byref(count)):
        return {}
    kinds: Counter[str] = Counter()
    kind = ctypes.c_int()
    for node in nodes[: count.value]:
        if driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)):
            return {}
        kinds[KINDS.get(kind.value, f"kind {kind.value}")] += 1
    return dict(kinds.most_common())
