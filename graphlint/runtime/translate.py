"""From what CUDA or torch raised first to the rule, the user's line and the cure.

The error that a failed capture shows is usually the second one ("failed due to a previous error"); the guard keeps the
first. Its text says what kind of call it was, its traceback where, and the watched warm-up which operators waited at
that line.
"""

from __future__ import annotations

import re
import threading
import traceback
from collections.abc import Sequence
from types import TracebackType

from graphlint.runtime.errors import CaptureError, Where, error_of
from graphlint.runtime.observe import OpEvent, user_line_of

# text of the error -> rule; the first match wins
_TEXT: tuple[tuple[str, str], ...] = (
    (r"Attempting CUDA graph capture of step\(\)|capturable=False|capturable is False", "not-capturable"),
    (r"does not support sparse gradients", "uncapturable-optimizer"),
    (r"Cannot copy between CPU and CUDA tensors during CUDA graph capture", "host-copy"),
    (r"Cannot call CUDAGeneratorImpl::(set_)?current_seed|manual_seed", "seed-in-region"),
    (r"Cannot call CUDAGeneratorImpl::|get_state|set_offset", "generator-state"),
    (
        r"generator not in capture mode|unexpected CUDA generator|Offset increment outside graph",
        "unregistered-generator",
    ),
    (r"unjoined|CaptureUnjoined", "unjoined-stream"),
    (r"legacy stream|CaptureImplicit", "default-stream"),
    (r"uncaptured work|CaptureIsolation", "outside-event"),
    (r"merge of two separate capture|CaptureMerge", "unforked-stream"),
    (r"prepare for replay during capturing|capture_begin.*already|already capturing", "nested-capture"),
    (r"NCCL error|ncclUnhandled|ProcessGroup", "first-collective"),
    (r"CUBLAS_STATUS_NOT_INITIALIZED|CUDNN_STATUS|CUFFT_|cuModuleLoad|lazy", "no-warmup"),
    (r"torch\._dynamo|TorchDynamo|InductorError|BackendCompilerFailed", "first-compiled-call"),
)
_SYNC = re.compile(r"called a synchronizing CUDA operation")
_REFUSED = re.compile(r"not permitted when stream is capturing|CaptureUnsupported")
_SOLVER = re.compile(r"cusolver|magma", re.IGNORECASE)
_PREVIOUS = re.compile(r"previous error during capture|CaptureInvalidated")
# the user's line -> rule, where the text says no more than "it waits"
_LINE: tuple[tuple[str, str], ...] = (
    (r"\bcuda\.synchronize\(|\.synchronize\(|\.query\(", "stream-sync"),
    (r"pin_memory", "pinned-alloc"),
    (r"empty_cache|memory_stats|reset_peak", "allocator-call"),
    (
        r"linalg\.|cholesky|\.inverse\(|\binverse\(|svd|eigh?\b|lstsq|pinv|lu_factor|matrix_exp|matrix_rank|\bsolve\(",
        "checked-linalg",
    ),
    (r"nonzero|argwhere|unique|masked_select|bincount|repeat_interleave|to_sparse|combinations|histc", "dynamic-shape"),
    (r"\bprint\(|\brepr\(|\bf\"|\bf'|\.format\(|logg(er|ing)", "printed-tensor"),
    (r"\bcond\(", "cond-operator"),
    (r"^(if|elif|assert)\b|\bif .* else\b", "data-dependent-branch"),
    (r"^while\b|\brange\(", "data-dependent-loop"),
    (r"all_reduce|all_gather|barrier\(|broadcast\(|reduce_scatter|dist\.", "blocking-collective"),
)
_OPS = {
    "aten::nonzero": "dynamic-shape",
    "aten::_unique2": "dynamic-shape",
    "aten::unique_dim": "dynamic-shape",
    "aten::unique_consecutive": "dynamic-shape",
    "aten::masked_select": "dynamic-shape",
    "aten::bincount": "dynamic-shape",
    "aten::repeat_interleave": "dynamic-shape",
    "aten::_linalg_check_errors": "checked-linalg",
    "aten::_linalg_eigh": "checked-linalg",
    "aten::equal": "host-sync",
}


def translate(
    first: BaseException,
    events: Sequence[OpEvent] = (),
    fallback: Where | None = None,
    memory: bool = False,
) -> CaptureError:
    """The first exception of a failed capture as a CaptureError.

    Args:
        first: what was raised first, with its traceback.
        events: what the watched warm-up saw.
        fallback: the line to name when the traceback holds none of the user's.
        memory: whether the exception says that memory ran out.
    """
    if isinstance(first, CaptureError):
        return first
    stage = stage_of(first.__traceback__)
    where = user_line_of(first.__traceback__) or fallback
    forward = _forward_of(events) if stage == "backward" else None
    rule = "graph-out-of-memory" if memory else rule_of(first, where, stage, events)
    reason = _reason(rule, first, where, stage)
    return error_of(rule)(reason, rule=rule, stage=stage, where=where, forward=forward, cause=first)


def rule_of(first: BaseException, where: Where | None, stage: str, events: Sequence[OpEvent]) -> str:
    """Which rule the failure breaks."""
    text = f"{type(first).__module__}.{type(first).__name__}: {first}"
    inside = _library_functions(first.__traceback__)
    if any(function.startswith("grad_scaler.py") for function in inside):
        return "unfused-scaler"
    for pattern, rule in _TEXT:
        if re.search(pattern, text):
            return _refine_copy(rule, where, inside)
    known = _SYNC.search(text) or _REFUSED.search(text) or _PREVIOUS.search(text) or _SOLVER.search(text)
    if stage == "optimizer" and any("optim" in function for function in inside):
        return "uncapturable-optimizer"
    if (library := _rule_of_library(inside)) is not None:
        return library
    if (seen := _rule_of_events(where, stage, events)) not in (None, "host-sync"):
        return str(seen)
    line = where.source_line if where else ""
    for pattern, rule in _LINE:
        if re.search(pattern, line):
            return rule
    if not known:
        return "unknown-capture-failure"
    return "thread-in-capture" if _PREVIOUS.search(text) else "host-sync"


def stage_of(trace: TracebackType | None) -> str:
    """`forward`, `backward` or `optimizer`, by the library functions that the error passed through."""
    for function in reversed(_library_functions(trace)):
        if function.startswith(("grad_scaler.py", "optimizer.py", "clip_grad.py")) or "/optim/" in function:
            return "optimizer"
        if function.startswith(("_tensor.py:backward", "graph.py:_engine")) or ":_engine_run_backward" in function:
            return "backward"
    return "forward"


def _library_functions(trace: TracebackType | None) -> list[str]:
    """`file.py:function` of every frame, outermost first; files of torch.optim are shown as `torch/optim/...`."""
    names = []
    for frame, _ in traceback.walk_tb(trace):
        path = frame.f_code.co_filename.replace("\\", "/")
        if "/torch/" in path:
            short = path.rsplit("/", 1)[-1]
            names.append(
                f"{'torch/optim/' if '/torch/optim/' in path and short != 'optimizer.py' else ''}{short}:"
                f"{frame.f_code.co_name}"
            )
    return names


def _refine_copy(rule: str, where: Where | None, inside: list[str]) -> str:
    """A host copy that comes from indexing has its own rule."""
    line = where.source_line if where else ""
    if rule == "host-copy" and not inside and re.search(r"\w\[", line):
        if not re.search(r"tensor\(|\.to\(|\.cuda\(|copy_\(|from_numpy|as_tensor|\bfull\(", line):
            return "host-index"
    return rule


def _rule_of_library(inside: list[str]) -> str | None:
    for function in inside:
        if function.startswith(("streams.py:", "__init__.py:synchronize")):
            return "stream-sync"
        if function.startswith("clip_grad.py"):
            return "host-sync"
        if "/distributions/" in function or function.startswith(("distribution.py", "constraints.py", "normal.py")):
            return "hidden-check"
        if function.startswith("_tensor_str.py"):
            return "printed-tensor"
        if function.startswith("distributed_c10d.py"):
            return "blocking-collective"
    return None


def _rule_of_events(where: Where | None, stage: str, events: Sequence[OpEvent]) -> str | None:
    """The rule of the operator that the watched warm-up saw at that line."""
    for event in events:
        here = event.in_backward if stage == "backward" else event.where is not None and event.where == where
        if here and (rule := _rule_of_op(event.op)) is not None:
            return rule
    return None


def _rule_of_op(op: str) -> str | None:
    try:
        from graphlint import rulebook

        fact = rulebook.load().ops.get(op)
    except Exception:
        fact = None
    return fact.rule if fact else _OPS.get(op)


def _forward_of(events: Sequence[OpEvent]) -> Where | None:
    return next((event.forward for event in events if event.in_backward and event.forward), None)


def _reason(rule: str, first: BaseException, where: Where | None, stage: str) -> str:
    line = where.source_line if where else ""
    told = f"`{line}`" if line else "the region"
    sentences = {
        "not-capturable": "the optimizer keeps its step count on the host (capturable=False)",
        "unfused-scaler": f"{told} reads found_inf on the host, since the optimizer under the scaler is not fused",
        "uncapturable-optimizer": f"{told} reads device values on the host",
        "host-copy": f"{told} copies pageable host memory to the device",
        "host-index": f"{told} indexes with host data, which must be copied to the device first",
        "dynamic-shape": f"{told} makes a tensor whose shape depends on data",
        "data-dependent-branch": f"{told} branches on a value on the device",
        "data-dependent-loop": f"{told} loops by a value on the device",
        "checked-linalg": f"{told} checks its result on the host",
        "stream-sync": f"{told} waits for a stream, an event or the device",
        "unregistered-generator": f"{told} draws from a generator that the graph does not know",
        "unjoined-stream": f"{told} forks a stream that is not joined before the region ends",
        "thread-in-capture": "a call in another thread, or one whose error was swallowed, ended the capture before "
        f"{told}; threads now: {', '.join(t.name for t in threading.enumerate())}",
        "graph-out-of-memory": "memory ran out while the graph was captured",
        "first-compiled-call": f"{told} compiles inside the capture",
        "nested-capture": f"{told} captures or replays a graph inside the capture",
        "host-sync": f"{told} waits for the GPU and brings a value to the host",
    }
    text = str(first).strip().splitlines()
    return sentences.get(rule, f"{told} can't be captured: {text[0] if text else type(first).__name__}")
