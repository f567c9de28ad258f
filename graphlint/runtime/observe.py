"""Watched warm-up: one eager call under a dispatch mode tells what the call reads, writes and draws from.

From it the guard knows which tensors outside the call it must keep alive and watch, which ones it must set back after
warm-up (each is copied before its first write), which generators the graph needs, and at which lines an operator waits
for the device, in forward and, by way of autograd's own metadata, in backward.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from graphlint.runtime.errors import Where

_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARY = tuple(
    os.path.realpath(path) + os.sep
    for path in {
        os.path.dirname(os.path.abspath(torch.__file__)),
        sysconfig.get_paths()["stdlib"],
        *(sysconfig.get_paths()[key] for key in ("purelib", "platlib")),
    }
)
_TYPED = ("<stdin", "<ipython", "<python-input", "<console")  # what a person types has no file
_TRACE_LINE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.+)')
# operators that make the host wait, or whose output shape is data; the tags of torch name the others
_WAITING = ("_local_scalar_dense", "nonzero", "_linalg_check_errors", "_linalg_eigh", "equal", "masked_select")
_TAGS = tuple(
    getattr(torch.Tag, name) for name in ("data_dependent_output", "dynamic_output_shape") if hasattr(torch.Tag, name)
)
_LIARS = ("running_mean", "running_var")  # native_batch_norm and its kin write them and do not say so in their schema
_SEEDED = torch.Tag.nondeterministic_seeded


@dataclass(frozen=True)
class OpEvent:
    """An operator that a graph can't hold, where the user's code called it, and for backward the forward line."""

    op: str
    where: Where | None
    forward: Where | None
    in_backward: bool


@dataclass(frozen=True)
class Written:
    """A storage outside the call that the call wrote: its bytes seen as uint8, and a copy from before the first
    write.
    """

    live: torch.Tensor
    before: torch.Tensor

    def undo(self) -> None:
        """Puts the old bytes back."""
        self.live.copy_(self.before)


@functools.lru_cache(maxsize=4096)
def is_library(filename: str) -> bool:
    """Whether a file belongs to torch, to another installed package, to Python or to graphlint, or is no Python
    file.
    """
    if filename.startswith("<"):
        return not filename.startswith(_TYPED)
    path = os.path.abspath(filename)
    if "/site-packages/" in path or "/dist-packages/" in path or path.endswith((".pyx", ".pxd", ".pxi")):
        return True
    return path.startswith(_OWN) or os.path.realpath(path).startswith(_LIBRARY)


def user_line(frame: FrameType | None) -> Where | None:
    """The innermost frame that is the user's own code."""
    while frame is not None:
        if not is_library(frame.f_code.co_filename):
            return Where(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back
    return None


def user_line_of(trace: TracebackType | None) -> Where | None:
    """The innermost line of an exception's traceback that is the user's own code."""
    best = None
    for frame, lineno in traceback.walk_tb(trace):
        if not is_library(frame.f_code.co_filename):
            best = Where(frame.f_code.co_filename, lineno, frame.f_code.co_name)
    return best


def forward_line() -> Where | None:
    """In backward under anomaly mode: the user's forward line of the autograd node that runs now."""
    node = torch._C._current_autograd_node()
    if node is None:
        return None
    best = None
    for text in node.metadata.get("traceback_") or ():
        for found in _TRACE_LINE.finditer(text):
            if not is_library(found["file"]):
                best = Where(found["file"], int(found["line"]), found["function"].strip())
    return best


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage of a tensor as uint8, sharing memory."""
    with torch.inference_mode(False), torch.no_grad():
        return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


class Observer(TorchDispatchMode):
    """Watches one eager call.

    Attributes:
        reads: the tensors outside the call that it read, by storage address.
        writes: the storages outside the call that it wrote, by address, with their bytes from before.
        events: operators that can't be captured.
        generators: those handed to operators.
        draws: whether random numbers were drawn.
        backward: whether autograd ran inside.
        rounding: the relative rounding of the coarsest arithmetic that it does.
        streams: the streams that operators ran on, with the first user's line on each.
    """

    def __init__(
        self, device_type: str, stream_id: Callable[[], int], keep: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        super().__init__()
        self.device_type = device_type
        self.stream_id = stream_id
        self.keep = keep
        self.reads: dict[int, torch.Tensor] = {}
        self.writes: dict[int, Written] = {}
        self.events: list[OpEvent] = []
        self.generators: list[torch.Generator] = []
        self.streams: dict[int, Where | None] = {}
        self.draws = False
        self.backward = False
        self.rounding = 1e-4
        self.calls = 0
        self._born: set[int] = set()
        self._lock = threading.Lock()  # autograd calls from its own thread

    def __enter__(self) -> Any:
        self.streams.setdefault(self.stream_id(), None)
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self._lock:
            self._before(func, args, kwargs)
        out = func(*args, **kwargs)
        with self._lock:
            self._after(out)
            self.rounding = max(self.rounding, _rounding_of(func, out))
        return out

    def _before(self, func: Any, args: Any, kwargs: Any) -> None:
        self.calls += 1
        in_backward = torch._C._current_autograd_node() is not None
        self.backward |= in_backward
        name = func._schema.name.split("::")[-1]
        if name in _WAITING or any(tag in func.tags for tag in _TAGS):
            self.events.append(self._event(func._schema.name, in_backward, args))
        if _SEEDED in func.tags:
            self.draws = True
        here = self.stream_id()
        if here not in self.streams:
            self.streams[here] = user_line(sys._getframe())
        self._tensors(func, args, kwargs)

    def _event(self, name: str, in_backward: bool, args: Any) -> OpEvent:
        forward = forward_line() if in_backward else None
        return OpEvent(name, user_line(sys._getframe()), forward, in_backward)

    def _tensors(self, func: Any, args: Any, kwargs: Any) -> None:
        """Sorts the operator's tensors into read and written, and copies what is about to be written for the first
        time.
        """
        written: set[int] = set()
        if func._schema.is_mutable or "batch_norm" in func._schema.name:
            for info, value in _named(func, args, kwargs):
                if info.name in _LIARS or (info.alias_info is not None and info.alias_info.is_write):
                    written.update(_address(t) for t in tree_iter(value) if _watchable(t))
        for leaf in tree_iter((args, kwargs)):
            if isinstance(leaf, torch.Generator):
                if all(leaf is not known for known in self.generators):
                    self.generators.append(leaf)
            elif _watchable(leaf) and (address := _address(leaf)) not in self._born:
                self.reads.setdefault(address, leaf)
                if address in written and address not in self.writes:
                    live = bytes_of(leaf)
                    self.writes[address] = Written(live, self.keep(live))

    def _after(self, out: Any) -> None:
        for leaf in tree_iter(out):
            if _watchable(leaf):
                address = _address(leaf)
                if address not in self.reads:
                    self._born.add(address)

    def undo(self) -> None:
        """Sets every storage that the call wrote back to its bytes from before."""
        for written in self.writes.values():
            written.undo()


_COARSE = {torch.bfloat16: 3e-2, torch.float16: 5e-3}


def _rounding_of(func: Any, out: Any) -> float:
    """The relative rounding of one operator: that of half precision, or of TF32 where it is switched on."""
    if not isinstance(out, torch.Tensor):
        return max((_COARSE.get(t.dtype, 0.0) for t in tree_iter(out) if isinstance(t, torch.Tensor)), default=0.0)
    name = func._schema.name
    if out.dtype is torch.float32 and out.is_cuda:
        convolves, multiplies = "conv" in name, name.endswith(("mm", "mv", "bmm", "linear"))
        if (convolves and torch.backends.cudnn.allow_tf32) or (multiplies and torch.backends.cuda.matmul.allow_tf32):
            return 2e-3
    return _COARSE.get(out.dtype, 0.0)


def _named(func: Any, args: Any, kwargs: Any) -> Iterable[tuple[Any, Any]]:
    """The operator's schema arguments with the values they got."""
    for i, info in enumerate(func._schema.arguments):
        if i < len(args) and not info.kwarg_only:
            yield info, args[i]
        elif info.name in kwargs:
            yield info, kwargs[info.name]


def _watchable(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and leaf.untyped_storage().nbytes() > 0


def _address(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())
