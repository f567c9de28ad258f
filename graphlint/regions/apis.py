"""What is known of APIs that capture: names, never spellings; how a name reached a file is settled in `names.py`."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

DEVICES = frozenset(
    {"cuda", "npu", "xpu", "musa", "hpu", "mlu", "supa", "sdaa", "gcu", "dipu", "maca", "mtia", "accelerator"}
)
_DEVICE_HINTS = ("device_module", "device_mod", "dev_module", "accelerator")

# Terminal names of calls worth resolving; project helpers join them as they are found.
TERMINALS = frozenset(
    {
        "graph",
        "compile",
        "optimize",
        "ScopedCapture",
        "capture_begin",
        "begin_capture",
        "make_graphed_callables",
        "enter_context",
        "enter_async_context",
        "__enter__",
        "capture_to_graph",
        "capture_safe",
    }
)

_ENDINGS = {"capture_begin": "capture_end", "begin_capture": "end_capture"}


def ending_of(terminal: str) -> str | None:
    """The name that ends what a call of `terminal` begins; the stream capture of CUDA's own APIs included."""
    return "StreamEndCapture" if "StreamBeginCapture" in terminal else _ENDINGS.get(terminal)


def ends(terminal: str, ending: str) -> bool:
    """Whether a call of `terminal` is the `ending` that `ending_of` named."""
    return terminal == ending or (ending == "StreamEndCapture" and ending in terminal)


class External(NamedTuple):
    """A callable outside the project that captures what it is given.

    `roots` are the packages it comes from; `takes` names the parameters that hold what is captured, in their position
    (none: the object captures what it is attached to). `decorates`: it may be used as `@name(...)`.
    """

    roots: frozenset[str]
    kind: str
    takes: tuple[str, ...]
    decorates: bool = False
    backward: bool = False


def _from(*roots: str) -> frozenset[str]:
    return frozenset(roots)


EXTERNAL: dict[str, External] = {
    "CudaGraphModule": External(_from("tensordict", "torchrl"), "wrapper", ("module",), decorates=True),
    "CudaGraphManager": External(_from("megatron"), "wrapper", ()),
    "CUDAGraphWrapper": External(_from("vllm", "vllm_ascend", "torchtitan"), "wrapper", ("runnable",)),
    "do_bench_cudagraph": External(_from("triton", "xformers"), "wrapper", ("fn",)),
    "wrap_in_hpu_graph": External(_from("habana_frameworks", "optimum"), "other-backend", ("module",)),
    "StaticCaptureTraining": External(_from("physicsnemo", "modulus"), "wrapper", ("model",), True, True),
    "StaticCaptureEvaluateNoGrad": External(_from("physicsnemo", "modulus"), "wrapper", ("model",), True),
    "make_graphed_callable": External(_from("sfast"), "graphed-callable", ("func",)),
    "simple_make_graphed_callable": External(_from("sfast"), "graphed-callable", ("func",)),
    "make_dynamic_graphed_callable": External(_from("sfast"), "graphed-callable", ("func",)),
    "capture_safe": External(_from("graphlint"), "wrapper", ("fn",), True, True),
}

GRAPHED = External(frozenset(), "graphed-callable", ("callables",), backward=True)


def context_kind(name: str) -> str | None:
    """The kind of region that `with name(...):` opens, or None when it opens none."""
    base, _, last = name.rpartition(".")
    if last == "graph":
        return _graph_kind(base)
    if last == "ScopedCapture":
        return "warp" if base.lstrip("?").partition(".")[0] in ("warp", "wp") else None
    if last == "capture_to_graph" and base.endswith("get_accelerator()"):
        return "graph"  # DeepSpeed's accelerator abstraction
    return None


def _graph_kind(base: str) -> str | None:
    owner = base.rpartition(".")[2].lstrip("?").rstrip("()").lower()
    if base in ("torch.cuda", "torch.cuda.graphs", "?cuda", "?self.cuda") or base.endswith(".torch.cuda"):
        return "graph"
    if owner in DEVICES and owner != "cuda":
        return "other-backend"
    if any(hint in owner for hint in _DEVICE_HINTS):
        return "graph"
    return None


def instance_kind(name: str) -> str | None:
    """The kind of region of `with g:` where `g` is the result named `name`."""
    return "other-backend" if name == "torch.accelerator.Graph()" else None


def begin_kind(name: str, terminal: str, packages: Collection[str]) -> str | None:
    """What a begin call captures for: `manual` for torch and CUDA's own APIs, or a backend; None when it is no capture.

    Other programs begin captures too, of packets or of sound: the file must import (`packages`) what would capture a
    graph, or the receiver must speak of one.
    """
    root = name.lstrip("?").partition(".")[0]
    if "StreamBeginCapture" in terminal:
        return "manual"
    if terminal == "begin_capture":
        return "cupy" if "cupy" in packages else None
    if root in ("warp", "wp"):
        return "warp"
    if any(graph in name for graph in ("HPUGraph", "NPUGraph", "XPUGraph", "MUSAGraph")):
        return "other-backend"
    return "manual" if "graph" in name.lower() or _CAPTURING & set(packages) else None


_CAPTURING = frozenset({"torch", "torch_npu", "habana_frameworks"})


def external(name: str) -> External | None:
    """What is known of a capturing callable outside the project."""
    last = name.rpartition(".")[2]
    if last == "make_graphed_callables":
        return GRAPHED
    found = EXTERNAL.get(last)
    return found if found is not None and name.partition(".")[0] in found.roots else None
