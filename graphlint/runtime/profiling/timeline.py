"""What a recording holds, as plain values: the nouns of a profile.

A recording of `torch.profiler`, of another tool that writes the Chrome trace format, or of Nsight Systems becomes one
`Timeline`; everything behind the readers works on this type alone and needs neither torch nor a GPU.
All times are microseconds on one clock shared by host and device.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum

Microseconds = float
Interval = tuple[Microseconds, Microseconds]
Correlation = int  # number that ties a host call to the device work it enqueued

# The recorder writes its marks under these names; readers find them again in any format that keeps range names.
STEP_MARK = "graphlint.step#"
MODULE_MARK = "graphlint.module::"
TORCH_MODULE = "nn.Module: "  # what torch.profiler writes with `with_stack` or `with_modules`


class CallKind(str, Enum):
    """What a call into the CUDA or HIP runtime does to the host."""

    LAUNCH = "launch"  # enqueues one kernel, copy or fill and returns
    GRAPH = "graph"  # enqueues a whole captured graph
    WAIT = "wait"  # blocks the host until the device is done
    ALLOC = "alloc"  # asks the driver for memory: cudaMalloc, cudaFree, cudaHostAlloc
    OTHER = "other"


class RangeKind(str, Enum):
    """Where a named range of host time comes from."""

    STEP = "step"  # one iteration, marked by the recorder, by `prof.step()` or by the user
    MODULE = "module"  # the forward call of one nn.Module
    OPTIMIZER = "optimizer"  # `Optimizer.step`, marked by torch itself
    OP = "op"  # one operator, forward or backward
    DATA = "data"  # a batch is fetched: torch marks `enumerate(DataLoader)`
    MARK = "mark"  # record_function or NVTX range of the user


@dataclass(frozen=True, slots=True)
class HostCall:
    """One call into the CUDA or HIP runtime."""

    name: str
    start: Microseconds
    end: Microseconds
    thread: int
    kind: CallKind
    correlation: Correlation | None = None


@dataclass(frozen=True, slots=True)
class HostRange:
    """One named stretch of host time."""

    name: str
    start: Microseconds
    end: Microseconds
    thread: int
    kind: RangeKind
    sequence: int | None = None  # autograd's number: a backward operator carries that of its forward operator
    backward: bool = False


@dataclass(frozen=True, slots=True)
class DeviceOp:
    """One kernel, copy or fill as the device ran it."""

    name: str
    start: Microseconds
    end: Microseconds
    stream: int
    kind: str = "kernel"  # "kernel", "memcpy" or "memset"
    correlation: Correlation | None = None
    grid: tuple[int, ...] = ()
    bytes: int = 0

    @property
    def duration(self) -> Microseconds:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Timeline:
    """One recording. Each tuple is sorted by start."""

    source: str
    calls: tuple[HostCall, ...]
    ranges: tuple[HostRange, ...]
    device: tuple[DeviceOp, ...]
    card: str = ""
    torch: str = ""
    notes: tuple[str, ...] = field(default=())  # what the reader had to guess or leave out

    @property
    def steps(self) -> tuple[HostRange, ...]:
        return tuple(r for r in self.ranges if r.kind is RangeKind.STEP)


_WAIT = re.compile(r"(Device|Stream|Event|Ctx)Synchronize")
_LAUNCH = re.compile(r"Launch|Memcpy|Memset|MemPrefetch")
_ALLOC = re.compile(r"Malloc|Free|HostAlloc|HostRegister|MemCreate|MemMap|MemRelease|MemUnmap|MemAddress")


def call_kind(name: str) -> CallKind:
    """The kind of a runtime or driver call, by its name (`cudaLaunchKernel`, `cuLaunchKernelEx`, `hipGraphLaunch`)."""
    if _WAIT.search(name) or name in ("cudaMemcpy", "hipMemcpy", "cudaMemset"):
        return CallKind.WAIT
    if "GraphLaunch" in name:
        return CallKind.GRAPH
    if _ALLOC.search(name):
        return CallKind.ALLOC
    if _LAUNCH.search(name) and "HostFunc" not in name:
        return CallKind.LAUNCH
    return CallKind.OTHER


def range_kind(name: str) -> RangeKind:
    """The kind of a user range, by its name."""
    if name.startswith((STEP_MARK, "ProfilerStep#")):
        return RangeKind.STEP
    if name.startswith((MODULE_MARK, TORCH_MODULE)):
        return RangeKind.MODULE
    if name.startswith("enumerate(DataLoader)"):
        return RangeKind.DATA
    if name.startswith("Optimizer.step#"):
        return RangeKind.OPTIMIZER
    return RangeKind.MARK


def module_name(range_name: str) -> tuple[str, str]:
    """Path and class that a module range stands for: `("model.blocks.0", "Block")`."""
    path, _, kind = range_name.removeprefix(MODULE_MARK).removeprefix(TORCH_MODULE).partition("|")
    return path, kind


def with_paths(ranges: Iterable[HostRange]) -> Iterator[HostRange]:
    """Gives the modules of `torch.profiler` a path: it writes `nn.Module: Linear_3` and leaves the rest to nesting.

    Args:
        ranges: sorted by start, outer ones first.
    """
    open_modules: dict[int, list[tuple[str, Microseconds]]] = {}
    for r in ranges:
        if not r.name.startswith(TORCH_MODULE):
            yield r
            continue
        stack = open_modules.setdefault(r.thread, [])
        while stack and stack[-1][1] <= r.start:
            stack.pop()
        numbered = r.name.removeprefix(TORCH_MODULE)
        stack.append((numbered, r.end))
        path = ".".join(name for name, _ in stack)
        yield replace(r, name=f"{MODULE_MARK}{path}|{numbered.rpartition('_')[0] or numbered}")


@contextmanager
def collector_paused() -> Iterator[None]:
    """Inside, no garbage is collected: a recording is millions of objects, none of them garbage."""
    mine = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if mine:
            gc.enable()


def busiest(devices: dict[object, list[DeviceOp]]) -> tuple[list[DeviceOp], str]:
    """The work of the device that did most, and a note on those left out: a step is judged on one device."""
    if len(devices) < 2:
        return next(iter(devices.values()), []), ""
    chosen = max(devices, key=lambda d: length((o.start, o.end) for o in devices[d]))
    return devices[chosen], f"{len(devices)} devices in the recording: device {chosen}, the busiest one, is judged"


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The intervals joined where they overlap, sorted."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def length(intervals: Iterable[Interval]) -> Microseconds:
    """Total length of the intervals, overlaps counted once."""
    return sum(end - start for start, end in union(intervals))


def overlap(one: Interval, other: Interval) -> Microseconds:
    """How long the two intervals lie over each other."""
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))


def net_durations(ops: Iterable[DeviceOp]) -> Iterator[tuple[DeviceOp, Microseconds]]:
    """Each device operation, in order of start, with the device time that it adds beyond the ones before it.

    What ran beside another stream's work adds nothing, so the sum is the time that the device was busy.
    """
    reached = float("-inf")
    for op in sorted(ops, key=lambda o: (o.start, o.end)):
        yield op, max(0.0, op.end - max(op.start, reached))
        reached = max(reached, op.end)
