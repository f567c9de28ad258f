"""`@capture_safe`: warm a function up, check it, capture it, prove that the replay is what eager does, and replay it
from then on.

What is wrong with the simpler thing: `with torch.cuda.graph(g): step()` is four lines, and then inputs must be copied
by hand into the tensors of the capture, warm-up has trained the model three times, a changed learning rate is ignored,
a moved parameter is read where it was, an error names the second fault and leaves the process unable to draw random
numbers, and nothing says whether the result is right.

The hard part is that a capture runs the user's code without running it. So the first call is the caller's real one,
eager and counted once; everything else the guard does around it is undone, bytes and generators included (`admit.py`).
After that a call is one generated function: a check, a grouped copy, a launch (`fastpath.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from graphlint.runtime.backend import GraphBackend
from graphlint.runtime.buckets import Buckets, Declared
from graphlint.runtime.guarded import CaptureSafe
from graphlint.runtime.options import Options
from graphlint.runtime.results import refuse_function

__all__ = ["CaptureSafe", "capture_safe"]


def capture_safe(
    fn: Callable[..., Any] | None = None,
    *,
    mode: str | None = None,
    warmup: int = 3,
    stream: Any = None,
    pool: Any = None,
    capture_error_mode: str = "thread_local",
    buckets: Buckets | Callable[..., Any] | None = None,
    pad: Mapping[str, float | int | bool] | None = None,
    unpad: Mapping[int, int] | None = None,
    inputs: str = "copy",
    outputs: str | int | None = None,
    modules: Sequence[torch.nn.Module] = (),
    optimizers: Sequence[torch.optim.Optimizer] = (),
    generators: Sequence[torch.Generator] = (),
    scaler: Any = None,
    tensor_lr: bool = True,
    verify: str | int = "first",
    on_violation: str = "raise",
    max_graphs: int = 8,
    watch: str = "sampled",
    backend: GraphBackend | None = None,
) -> Any:
    """Guards a function, a method or a module: captured on its first call, proved, and replayed from then on.

    Use it as `@capture_safe`, `@capture_safe(mode=...)` or `capture_safe(module, ...)`. The first call runs eagerly
    and counts once: parameters, buffers, gradients, optimizer and scaler state and generators are then what one eager
    call leaves. Every tensor argument must be on one device; other arguments must be hashable and choose the graph.

    Args:
        fn: what is guarded. State that it reaches by closure, globals or `self` is found; state it can't be seen to
            reach is declared below.
        mode: "step" (default for functions): no autograd across the call, it may hold backward and optimizer.
            "forward" (default for modules): the same without gradients. "autograd": forward and backward graphs,
            gradients flow to arguments and parameters.
        warmup: calls before the capture, all but the first of them undone.
        stream, pool: a stream to capture on and a pool handle, else the guard's own.
        capture_error_mode: as in `torch.cuda.graph`; "thread_local" lets other threads use CUDA meanwhile.
        buckets: `{"x": (dim, [512, 1024, 2048])}`: calls are padded to the next size and replay its graph; all sizes
            are captured at the first call, the largest first. Or a function of the arguments whose hashable result
            becomes part of the key.
        pad: what fills the padding, by argument name; 0 where not given.
        unpad: `{output index: dim}` to cut back; without it the guard finds out by comparing shapes.
        inputs: "copy": into the guard's buffers; "alias": the caller passes the tensors of `input_buffers()`
            themselves.
        outputs: "alias" (default): the graph's own memory where the caller lets go of each result before the next
            call, copies where results are kept; "clone" (default in mode "autograd"): always copies; or a ring depth.
        modules, optimizers, generators, scaler: further state to set back, watch and register.
        tensor_lr: turn the lr of capturable optimizers into a device tensor, so that schedulers reach the graph.
        verify: "first" (3 steps against eager, then the next 2 real calls), a number of steps, or "off".
        on_violation: "raise"; "eager": run eagerly, counted, with one warning per reason; "recapture" when a watched
            fact fails; "warn": go on with the graph.
        max_graphs: graphs kept; the one not used for longest is dropped.
        watch: "sampled", "full" or "off": how often the facts a graph relies on are looked at.
        backend: the device kind; CUDA when None.

    Raises:
        ValueError: an option that does not exist.
        TypeError: a class, a generator or coroutine function, or nothing that can be called.
        CaptureError: on calls; the subclass, `.code` and `.where` tell what and where. With "raise" a failed call has
            no effect.
    """
    if fn is None:
        given = {k: v for k, v in locals().items() if k != "fn"}
        return lambda fn: capture_safe(fn, **given)
    if isinstance(fn, CaptureSafe):
        return fn
    refuse_function(fn)
    mode = mode or ("forward" if isinstance(fn, torch.nn.Module) else "step")
    outputs = outputs if outputs is not None else ("clone" if mode == "autograd" else "alias")
    declared = Declared.of(buckets, pad) if isinstance(buckets, Mapping) else buckets
    options = Options(
        mode, warmup, stream, pool, capture_error_mode, declared, unpad, inputs, outputs, tensor_lr, verify,
        on_violation, max_graphs, watch,
    )  # fmt: skip
    extra: dict[str, Any] = {f"modules[{i}]": m for i, m in enumerate(modules)}
    extra |= {f"optimizers[{i}]": o for i, o in enumerate(optimizers)}
    extra |= {f"generators[{i}]": g for i, g in enumerate(generators)}
    if scaler is not None:
        extra["scaler"] = scaler
    return CaptureSafe(fn, options, extra, backend)
