"""A CPU backend that behaves like a CUDA graph, so that the guard's logic is tested without a GPU.

Capture runs the body under a dispatch mode that writes every operator on a tape, then undoes all effects: as on a GPU,
capturing changes nothing. Replay runs the tape again on the *same* tensors: Python numbers are frozen, addresses are
frozen, a rebound attribute is not seen, and random numbers are fresh. Reading a value raises what torch raises with
sync-debug mode on.
"""

from __future__ import annotations

import ctypes
import itertools
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from graphlint.runtime.backend import CaptureFailed, CaptureRequest, Copies, UncapturedWork
from graphlint.runtime.observe import _TAGS, _WAITING, Observer

T = TypeVar("T")
_INVALIDATING = ("_linalg_eigh",)  # on the GPU these kill the capture even when it is armed


class Tape(TorchDispatchMode):
    """Records operators while they run; `run` runs them again into the recorded outputs."""

    def __init__(self, request: CaptureRequest) -> None:
        super().__init__()
        self.request = request
        self.entries: list[tuple[Any, Any, Any, Any]] = []
        self.invalid = False
        self.journal = Observer("cpu", lambda: 0, torch.clone)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._refuse(func, args, kwargs)
        self.journal._before(func, args, kwargs)
        out = func(*args, **kwargs)
        self.journal._after(out)
        if func._schema.is_mutable or not _is_view(out, args, kwargs):
            self.entries.append((func, args, kwargs, out))
        return out

    def _refuse(self, func: Any, args: Any, kwargs: Any) -> None:
        """Raises what the GPU raises at operators that can't be captured."""
        name = func._schema.name.split("::")[-1]
        if name in _INVALIDATING:
            self.invalid = True
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        reads = name in _WAITING or any(tag in func.tags for tag in _TAGS)
        masks = name in ("index", "index_put_") and any(_is_mask(leaf) for leaf in tree_iter(args[1]))
        if masks or (reads and name not in ("index", "repeat_interleave")):
            if not self.request.armed:
                self.invalid = True
            raise RuntimeError("called a synchronizing CUDA operation")
        for leaf in tree_iter((args, kwargs)):
            if isinstance(leaf, torch.Generator) and leaf is not torch.default_generator:
                if all(leaf is not known for known in self.request.generators):
                    raise RuntimeError("Attempt to increase offset for a CUDA generator not in capture mode.")

    def run(self) -> None:
        """Replays: same operators, same tensors, same numbers."""
        with torch.no_grad():
            for func, args, kwargs, out in self.entries:
                result = func(*args, **kwargs)
                if not func._schema.is_mutable:
                    _copy_into(out, result)


class FakeGraph:
    """A tape that looks like a CUDA graph."""

    def __init__(self, tape: Tape) -> None:
        self.tape: Tape | None = tape
        self.replays = 0

    @property
    def replay(self) -> Callable[[], object]:
        """The launch."""
        return self._replay

    def _replay(self) -> None:
        assert self.tape is not None, "a graph that was reset is replayed"
        self.replays += 1
        self.tape.run()

    def reset(self) -> None:
        """Drops the tape and with it every tensor on it."""
        self.tape = None

    def node_counts(self) -> dict[str, int]:
        """Operators on the tape, all called kernels."""
        return {"kernel": len(self.tape.entries)} if self.tape else {}


class FakeBackend:
    """Captures on the CPU. `log` keeps what the guard asked for, in order; `fail` is raised by the next capture.

    `stream` is the number of the current stream, which a test may change; streams in `joined` are part of a capture.
    """

    device_type = "cpu"
    times = False

    def __init__(self) -> None:
        self.log: list[str] = []
        self.fail: BaseException | None = None
        self.graphs: list[FakeGraph] = []
        self.stream = 0
        self.joined: set[int] = set()
        self.heals = True
        self.refuses_copies = False
        self.free = 1 << 40
        self._numbers = itertools.count(1)
        self._free: list[int] = []

    def unavailable(self) -> str:
        """Always available."""
        return ""

    def current_device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    def new_stream(self, device: torch.device) -> Any:
        """A number that stands for a stream."""
        return self._free.pop() if self._free else next(self._numbers)

    def give_back(self, stream: Any) -> None:
        """Keeps it for the next guard."""
        self._free.append(stream)

    def new_pool(self, device: torch.device) -> Any:
        """A pool is the list of graphs captured into it."""
        self.log.append("pool")
        return []

    @contextmanager
    def on_stream(self, stream: Any) -> Iterator[None]:
        """Notes that work ran on the side stream."""
        self.log.append("side")
        yield

    def capture(self, body: Callable[[], T], request: CaptureRequest) -> tuple[FakeGraph, T]:
        """Runs the body on a tape and undoes what it did."""
        self.log.append("capture")
        states = [gen.get_state() for gen in self.generators(request.device) + list(request.generators)]
        tape = Tape(request)
        alone = [stream for stream in request.streams if stream not in self.joined]
        first: BaseException | None = self.fail or (UncapturedWork(alone[0]) if alone else None)
        self.fail = None
        out: Any = None
        try:
            with tape:
                if first is not None:
                    raise first
                out = body()
        except BaseException as error:
            first = error
        tape.journal.undo()
        for gen, state in zip(self.generators(request.device) + list(request.generators), states, strict=True):
            gen.set_state(state)
        if first is not None:
            if tape.invalid:
                self.log.append("heal")
            raise CaptureFailed(first, invalidated=tape.invalid, healed=self.heals or not tape.invalid) from first
        graph = FakeGraph(tape)
        self.graphs.append(graph)
        request.pool.append(graph)
        return graph, out

    def synchronize(self, device: torch.device) -> None:
        """Nothing to wait for."""

    def capturing(self) -> bool:
        """Whether a tape is on."""
        from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

        return any(isinstance(mode, Tape) for mode in _get_current_dispatch_mode_stack())

    @property
    def capturing_now(self) -> Callable[[], bool]:
        """The same."""
        return self.capturing

    def stream_id(self, device: torch.device) -> Callable[[], int]:
        """The number in `stream`, which a test may change."""
        return lambda: self.stream

    def after_stream(self, device: torch.device, stream_id: int) -> None:
        """Notes that the current stream waited."""
        self.log.append(f"wait {stream_id}")

    def generators(self, device: torch.device) -> list[torch.Generator]:
        """The CPU's default generator."""
        return [torch.default_generator]

    def allocated(self, device: torch.device) -> int:
        """Unknown on a CPU."""
        return 0

    def pool_bytes(self, pool: Any) -> int:
        """Bytes of the outputs of every operator on the tapes of the pool."""
        return sum(
            leaf.untyped_storage().nbytes()
            for graph in pool
            if graph.tape
            for entry in graph.tape.entries
            for leaf in tree_iter(entry[3])
            if isinstance(leaf, torch.Tensor)
        )

    def out_of_memory(self, error: BaseException) -> bool:
        """As on the GPU, by type."""
        return isinstance(error, torch.OutOfMemoryError)

    def free_bytes(self, device: torch.device) -> int:
        """The number in `free`, which a test may change."""
        return self.free

    def copies(
        self, device: torch.device, addresses: Sequence[int], sizes: Sequence[int], stream: ctypes.c_void_p
    ) -> Copies | None:
        """Moves bytes on the CPU; `refuses_copies` makes every launch fail, as in a thread without a context."""
        block = ctypes.create_string_buffer(8 * len(sizes))

        def launch() -> int:
            self.log.append("copies")
            if self.refuses_copies:
                return 201
            for to, source, size in zip(addresses, struct.unpack(f"{len(sizes)}Q", block), sizes, strict=True):
                ctypes.memmove(to, source, size)
            return 0

        return Copies(struct.Struct(f"{len(sizes)}Q").pack_into, block, 0, launch)

    def kernels(self, body: Callable[[], object], device: torch.device) -> dict[str, int] | None:
        """Not measured on a CPU."""
        return None


def _is_view(out: Any, args: Any, kwargs: Any) -> bool:
    inputs = {t.untyped_storage().data_ptr() for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)}
    outputs = [t for t in tree_iter(out) if isinstance(t, torch.Tensor)]
    return bool(outputs) and all(t.numel() and t.untyped_storage().data_ptr() in inputs for t in outputs)


def _is_mask(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.bool, torch.uint8)


def _copy_into(recorded: Any, result: Any) -> None:
    for old, new in zip(tree_iter(recorded), tree_iter(result), strict=True):
        if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
            old.data.copy_(new)  # a replay is no operation that autograd could count
