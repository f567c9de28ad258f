"""What the guard needs from a device, and nothing more. `cuda.py` is the real one, `fake.py` a CPU one for tests.

Everything above this line of the house is plain Python over tensors: it can be tested without a GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch

T = TypeVar("T")


@dataclass(frozen=True)
class CaptureRequest:
    """How a body is to be captured.

    `armed`: make synchronising calls raise at their line instead of invalidating the capture. `generators`: beside the
    device's default one, those that the body draws from.
    """

    device: torch.device
    stream: Any
    pool: Any
    error_mode: str = "thread_local"
    generators: tuple[torch.Generator, ...] = ()
    armed: bool = True
    streams: tuple[int, ...] = ()  # other streams that the call works on; they must have joined the capture


class Graph(Protocol):
    """A captured body. `replay` launches it on the caller's current stream; it is read once and then called bare."""

    @property
    def replay(self) -> Callable[[], object]: ...

    def reset(self) -> None:
        """Gives up the graph and its share of the pool; `replay` must not be called afterwards."""

    def node_counts(self) -> dict[str, int]:
        """How many nodes of each kind (`kernel`, `memcpy`, `memset`, `host`, ...); empty where it can't be told."""


class UncapturedWork(Exception):
    """The body worked on a stream that the capture did not see; the argument is the stream's number."""


@dataclass
class CaptureFailed(Exception):
    """The body was not captured. `first` is what was raised first; the capture itself is over and the process is sane.

    `invalidated`: the device refused to end the capture, so it had to be healed. `healed`: the probe after it passed.
    """

    first: BaseException
    invalidated: bool = False
    healed: bool = True
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Copies:
    """One grouped copy that takes bare addresses: `pack(block, at, *addresses)` says from where, `launch()` sends it to
    the current stream and gives 0; any other answer means that nothing was copied.
    """

    pack: Callable[..., None]
    block: Any
    at: int
    launch: Callable[[], int]


class GraphBackend(Protocol):
    """A kind of device that can capture and replay."""

    device_type: str
    times: bool  # whether the time of a replay means anything

    def unavailable(self) -> str:
        """Why nothing can be captured here, as one sentence; empty when something can."""

    def current_device(self) -> torch.device:
        """The device of a call that shows no tensor."""

    def new_stream(self, device: torch.device) -> Any:
        """A side stream for warm-up and capture, not shared with another live guard."""

    def give_back(self, stream: Any) -> None:
        """Takes such a stream back."""

    def new_pool(self, device: torch.device) -> Any:
        """A memory pool that several graphs can share."""

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Work inside runs on `stream`, after what the current stream has queued; the current stream then waits for
        it.
        """

    def capture(self, body: Callable[[], T], request: CaptureRequest) -> tuple[Graph, T]:
        """Captures `body()` without running it on the device. Raises CaptureFailed, with the process healed."""

    def synchronize(self, device: torch.device) -> None:
        """Waits for the device."""

    def capturing(self) -> bool:
        """Whether the calling thread's current stream is being captured by somebody."""

    @property
    def capturing_now(self) -> Callable[[], bool]:
        """The same as a bare function, for calls on a device that is in use already."""

    def stream_id(self, device: torch.device) -> Callable[[], int]:
        """A cheap function that names the current stream of the device."""

    def after_stream(self, device: torch.device, stream_id: int) -> None:
        """Makes the current stream wait for what that stream has queued."""

    def copies(
        self, device: torch.device, addresses: Sequence[int], sizes: Sequence[int], stream: ctypes.c_void_p
    ) -> Copies | None:
        """A grouped copy into the buffers at `addresses`, `sizes` bytes each, on the stream that `stream` points to
        when it is launched; None where torch's own must do.
        """

    def generators(self, device: torch.device) -> list[torch.Generator]:
        """The default generators of the device."""

    def allocated(self, device: torch.device) -> int:
        """Bytes in live tensors on the device."""

    def pool_bytes(self, pool: Any) -> int:
        """Bytes that the pool holds."""

    def out_of_memory(self, error: BaseException) -> bool:
        """Whether that error says that memory ran out."""

    def free_bytes(self, device: torch.device) -> int:
        """Bytes that could still be allocated on the device."""

    def kernels(self, body: Callable[[], object], device: torch.device) -> dict[str, int] | None:
        """How often each kernel was launched while `body()` ran; None where that can't be measured."""


_default: GraphBackend | None = None


def default() -> GraphBackend:
    """The backend that `capture_safe` uses when none is named: CUDA."""
    global _default
    if _default is None:
        from graphlint.runtime.cuda import CudaBackend

        _default = CudaBackend()
    return _default
