"""Counting a graph's nodes through the driver, played by a library that has a graph of four."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

pytest.importorskip("torch")

from graphlint.runtime.nodes import node_counts


class Kept:
    def raw_cuda_graph(self) -> int:
        return 7


class Driver:
    """Kernel, kernel, memset and a kind of the future, at the addresses 100 to 103 of graph 7."""

    kinds = (0, 0, 2, 99)

    def __init__(self, broken: str = "") -> None:
        self.broken = broken

    def cuGraphGetNodes(self, graph: Any, nodes: Any, count: Any) -> int:
        assert graph.value == 7
        ctypes.cast(count, ctypes.POINTER(ctypes.c_size_t))[0] = len(self.kinds)
        for i in range(len(self.kinds) if nodes is not None else 0):
            nodes[i] = 100 + i
        return 1 if self.broken == "nodes" else 0

    def cuGraphNodeGetType(self, node: Any, kind: Any) -> int:
        ctypes.cast(kind, ctypes.POINTER(ctypes.c_int))[0] = self.kinds[node.value - 100]
        return 1 if self.broken == "type" else 0


def test_nodes_are_counted_by_kind() -> None:
    assert node_counts(Kept(), Driver()) == {"kernel": 2, "memset": 1, "kind 99": 1}


@pytest.mark.parametrize("broken", ["nodes", "type"])
def test_a_driver_that_refuses(broken: str) -> None:
    assert node_counts(Kept(), Driver(broken)) == {}


def test_no_driver_or_no_kept_graph() -> None:
    assert node_counts(Kept(), None) == {}
    assert node_counts(object(), Driver()) == {}
