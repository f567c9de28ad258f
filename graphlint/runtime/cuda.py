"""The CUDA backend: begin, end, heal. Everything that decides is elsewhere.

What was measured and is relied on here (torch 2.11, H200): with sync-debug mode "error" switched on after
`capture_begin` and off before `capture_end`, most synchronising calls raise at their line and the capture stays valid.
Where it does not, the stream is still the capture stream and every generator still believes it is being captured;
restoring the stream and capturing one trivial operation in a throw-away graph heals both, and older graphs still
replay.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from graphlint.runtime.backend import CaptureFailed, CaptureRequest, Copies, UncapturedWork
from graphlint.runtime.driver import driver_copies, library
from graphlint.runtime.nodes import node_counts

T = TypeVar("T")
KEEPS = hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph")  # whether a graph can be kept and looked into
_BACKGROUND = ("pin_memory", "QueueFeeder", "tqdm", "TMonitor", "pydevd", "IPython")


class CudaGraph:
    """A `torch.cuda.CUDAGraph` of ours."""

    def __init__(self, graph: Any, pool: Any) -> None:
        self._graph: Any = graph
        self._pool = pool
        self._nodes: dict[str, int] | None = None

    @property
    def replay(self) -> Callable[[], object]:
        """The C++ launch itself, without the Python method around it."""
        base = getattr(torch._C, "_CUDAGraph", None)
        if base is not None and type(self._graph).replay is torch.cuda.CUDAGraph.replay:
            return base.replay.__get__(self._graph)  # type: ignore[no-any-return]
        return self._graph.replay  # type: ignore[no-any-return]

    def reset(self) -> None:
        """Destroys the graph; its blocks go back to the pool, the pool back to the allocator with its last graph."""
        self._graph.reset()

    def node_counts(self) -> dict[str, int]:
        """Nodes by kind, as the driver tells them; empty with a torch before 2.8, which keeps no graph."""
        if self._nodes is None:
            self._nodes = node_counts(self._graph, library())
        return self._nodes


class CudaBackend:
    """Captures on CUDA devices. One instance serves all guards."""

    device_type = "cuda"
    times = True

    def unavailable(self) -> str:
        """Empty when a CUDA device can be used."""
        if not torch.backends.cuda.is_built():
            return "this torch was built without CUDA"
        if not torch.cuda.is_available():
            return "no CUDA device is visible"
        if torch.cuda.get_allocator_backend() != "native":
            return "the cudaMallocAsync allocator has no graph pools; unset `backend` in PYTORCH_CUDA_ALLOC_CONF"
        if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING"):
            return "PYTORCH_NO_CUDA_MEMORY_CACHING switches off the pools that graphs need"
        return ""

    def current_device(self) -> torch.device:
        """Where a call without tensors works."""
        return torch.device("cuda", torch.cuda.current_device())

    def __init__(self) -> None:
        self._workspaces: list[Any] = []
        self._free: list[torch.cuda.Stream] = []

    def new_stream(self, device: torch.device) -> torch.cuda.Stream:
        """A side stream of the device, with cuBLAS workspaces that stay where they are.

        No two live guards share one: graphs captured on one stream share its workspaces, and would disturb each
        other when they are replayed at the same time. A stream that was given back is used again, for its workspaces
        are large.
        """
        for i, stream in enumerate(self._free):
            if stream.device == device:
                return self._free.pop(i)
        stream = torch.cuda.Stream(device)
        with contextlib.suppress(RuntimeError, AttributeError):
            self._own_workspaces(stream)
        return stream

    def give_back(self, stream: torch.cuda.Stream) -> None:
        """Takes a stream back whose guard is gone; no graph captured on it may be replayed any more."""
        self._free.append(stream)

    def _own_workspaces(self, stream: torch.cuda.Stream) -> None:
        """Has cuBLAS allocate its workspaces for the stream, of this thread and of autograd's, in a pool that nobody
        else uses.

        A graph knows its workspace by address. Others may free it at any time (torch.compile's own CUDA graphs do
        when they record); from this pool it is then given to nobody, and the graph can go on using it.
        """
        index = stream.device.index or 0
        with self.on_stream(stream), torch.inference_mode(False), torch.enable_grad():
            pool = torch.cuda.MemPool()
            torch._C._cuda_beginAllocateToPool(index, pool.id)
            try:
                for dtype in (torch.float32, torch.bfloat16):
                    a = torch.ones(16, 16, dtype=dtype, device=stream.device, requires_grad=True)
                    (torch.nn.functional.linear(a, a, a[0]) @ a).sum().backward()
            finally:
                torch._C._cuda_endAllocateToPool(index, pool.id)
                torch._C._cuda_releasePool(index, pool.id)
        self._workspaces.append(pool)

    def new_pool(self, device: torch.device) -> Any:
        """A pool handle; known beforehand, so that a failed capture can give it back."""
        return torch.cuda.graph_pool_handle()

    @contextlib.contextmanager
    def on_stream(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """Runs on `stream` between two waits, on its device."""
        current = torch.cuda.current_stream(stream.device)
        stream.wait_stream(current)
        with torch.cuda.device(stream.device), torch.cuda.stream(stream):
            yield
        current.wait_stream(stream)

    def capture(self, body: Callable[[], T], request: CaptureRequest) -> tuple[CudaGraph, T]:
        """Begins, runs the body, ends; keeps the first error and heals the process."""
        device, stream = request.device, request.stream
        previous = torch.cuda.current_stream(device)
        with torch.cuda.device(device), _without_gc():
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
            graph = torch.cuda.CUDAGraph(keep_graph=True) if KEEPS else torch.cuda.CUDAGraph()
            stream.wait_stream(previous)
            first: BaseException | None = None
            second: BaseException | None = None
            out: Any = None
            torch.cuda.set_stream(stream)
            try:
                first = second = _begin(graph, request)
                if first is None:
                    out, first = _run(body, request.armed and not _other_threads())
                    first = first or self._missed(request)
                    torch.cuda.set_stream(stream)  # the body may have left another one current
                    second = _end(graph)
            finally:
                torch.cuda.set_stream(previous)
            if first is None and second is None:
                previous.wait_stream(stream)
                return CudaGraph(graph, request.pool), out
            del out
            healed = self._recover(graph, request, second is not None)
        raise CaptureFailed(first or second or RuntimeError(), second is not None, healed) from (first or second)

    def _missed(self, request: CaptureRequest) -> BaseException | None:
        """Work on a stream that is not part of the capture ran now and will not be replayed."""
        for stream_id in request.streams:
            here = torch.cuda.ExternalStream(stream_id, device=request.device) if stream_id else None
            with torch.cuda.stream(here or torch.cuda.default_stream(request.device)):
                try:
                    captured = torch.cuda.is_current_stream_capturing()
                except RuntimeError:
                    captured = False
            if not captured:
                return UncapturedWork(stream_id)
        return None

    def _recover(self, graph: Any, request: CaptureRequest, invalidated: bool) -> bool:
        """Gives the pool back and, when the capture was invalidated, frees generators and allocator from it."""
        if not invalidated:
            graph.reset()
            return True
        index = request.device.index or 0
        for call in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
            with contextlib.suppress(RuntimeError, AttributeError):
                getattr(torch._C, call)(index, request.pool)
        with contextlib.suppress(RuntimeError):
            graph.reset()
        return self._heal(request)

    def _heal(self, request: CaptureRequest) -> bool:
        """Captures one trivial operation with the same generators: its clean end clears what the failed one left."""
        try:
            torch.cuda.synchronize(request.device)
        except RuntimeError:
            return False
        try:
            trivial = torch.cuda.CUDAGraph()
            scratch = torch.zeros(1, device=request.device)
            stream = torch.cuda.Stream(request.device)
            with torch.cuda.stream(stream), torch.inference_mode(False):
                for gen in request.generators:
                    trivial.register_generator_state(gen)
                trivial.capture_begin(capture_error_mode=request.error_mode)
                scratch.add_(1)
                trivial.capture_end()
            trivial.reset()
            return self._probe(request)
        except RuntimeError:
            return False

    def _probe(self, request: CaptureRequest) -> bool:
        """Draws, allocates and synchronises; the draw is undone."""
        gens = [*self.generators(request.device), *request.generators]
        states = [gen.get_state() for gen in gens]
        for gen in gens:
            torch.empty(1, device=request.device).normal_(generator=gen)
        for gen, state in zip(gens, states, strict=True):
            gen.set_state(state)
        torch.cuda.synchronize(request.device)
        return True

    def synchronize(self, device: torch.device) -> None:
        """Waits for everything on the device."""
        torch.cuda.synchronize(device)

    def capturing(self) -> bool:
        """Whether the current stream is captured."""
        return bool(torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())

    @property
    def capturing_now(self) -> Callable[[], bool]:
        """Torch's C++ question itself."""
        return torch._C._cuda_isCurrentStreamCapturing  # type: ignore[no-any-return]

    def stream_id(self, device: torch.device) -> Callable[[], int]:
        """The raw current stream of the device."""
        return functools.partial(torch._C._cuda_getCurrentRawStream, device.index or 0)

    def after_stream(self, device: torch.device, stream_id: int) -> None:
        """The current stream waits for that raw stream."""
        current = torch.cuda.current_stream(device)
        if stream_id == 0:
            current.wait_stream(torch.cuda.default_stream(device))
        else:
            current.wait_stream(torch.cuda.ExternalStream(stream_id, device=device))

    def copies(
        self, device: torch.device, addresses: Sequence[int], sizes: Sequence[int], stream: ctypes.c_void_p
    ) -> Copies | None:
        """One launch by the driver."""
        return driver_copies(device, addresses, sizes, stream)

    def generators(self, device: torch.device) -> list[torch.Generator]:
        """The device's default generator."""
        return [torch.cuda.default_generators[device.index or 0]]

    def allocated(self, device: torch.device) -> int:
        """Bytes in live tensors."""
        return int(torch.cuda.memory_allocated(device))

    def pool_bytes(self, pool: Any) -> int:
        """Bytes of the segments that the allocator holds for the pool."""
        segments = torch.cuda.memory_snapshot()
        return sum(int(s["total_size"]) for s in segments if tuple(s.get("segment_pool_id", ())) == tuple(pool))

    def out_of_memory(self, error: BaseException) -> bool:
        """By type."""
        return isinstance(error, torch.OutOfMemoryError)

    def free_bytes(self, device: torch.device) -> int:
        """Free on the device, and reserved by torch without being used."""
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))

    def kernels(self, body: Callable[[], object], device: torch.device) -> dict[str, int] | None:
        """Counts kernels with torch's profiler; None where it can't see the device."""
        from torch.profiler import ProfilerActivity, profile

        torch.cuda.synchronize(device)
        try:
            with profile(activities=[ProfilerActivity.CUDA]) as prof:
                body()
                torch.cuda.synchronize(device)
        except RuntimeError:
            return None
        counts: dict[str, int] = {}
        for event in prof.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                counts[event.name] = counts.get(event.name, 0) + 1
        return counts or None


def _begin(graph: Any, request: CaptureRequest) -> BaseException | None:
    """Opens the capture outside inference mode: the generator's state must not become an inference tensor."""
    try:
        with torch.inference_mode(False), _without_warnings():
            for gen in request.generators:
                graph.register_generator_state(gen)
            graph.capture_begin(pool=request.pool, capture_error_mode=request.error_mode)
    except BaseException as error:
        return error
    return None


def _run(body: Callable[[], Any], armed: bool) -> tuple[Any, BaseException | None]:
    """Runs the body inside the open capture, armed; the error is kept, not raised."""
    before = torch.cuda.get_sync_debug_mode()
    try:
        if armed:
            torch._C._cuda_set_sync_debug_mode(2)
        return body(), None
    except BaseException as error:  # KeyboardInterrupt too: the capture must be ended first
        return None, error
    finally:
        torch._C._cuda_set_sync_debug_mode(before)


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Torch warns of an empty graph in the middle of ending its capture. Where warnings are errors, that leaves a graph
    half made, whose destruction aborts the process (seen on torch 2.11).
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _end(graph: Any) -> BaseException | None:
    try:
        with _without_warnings():
            graph.capture_end()
        if KEEPS:
            graph.instantiate()
    except BaseException as error:
        return error
    return None


def _other_threads() -> bool:
    """Whether threads run that may rightly synchronise: sync-debug mode is one switch for the whole process."""
    return any(
        thread is not threading.current_thread()
        and not thread.name.startswith("MainThread")
        and not any(word in thread.name for word in _BACKGROUND)
        for thread in threading.enumerate()
    )


@contextlib.contextmanager
def _without_gc() -> Iterator[None]:
    """No garbage collection inside: destroying another graph would end the capture."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
