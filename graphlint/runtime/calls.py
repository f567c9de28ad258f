"""From arguments to a key: what the call is, on which device, and which graph could serve it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

import torch

from graphlint.runtime.backend import GraphBackend
from graphlint.runtime.buckets import BucketPlan, Declared
from graphlint.runtime.errors import NoDeviceError, SignatureError, Where
from graphlint.runtime.found import Found
from graphlint.runtime.inputs import check_inputs
from graphlint.runtime.options import Options
from graphlint.runtime.spec import Spec, flatten_call

DDP_WARMUP = 11  # torch's own advice
_DATA_PARALLEL = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DataParallel")


@dataclass
class Call:
    """One call on its way to a graph; with a plan when it goes to a bucket."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: list[Any]
    spec: Spec
    plan: BucketPlan | None = None

    def spec_at(self, size: int) -> Spec:
        """The spec of the call in the bucket of that size; its own without buckets."""
        return self.plan.widen(self.spec, size) if self.plan else self.spec

    @property
    def size(self) -> int:
        """The bucket that the call belongs to; 0 without buckets. Raises OutOfBucketError."""
        return self.plan.choose(self.plan.length(self.leaves)) if self.plan else 0


class Reader:
    """Reads calls of one function."""

    def __init__(self, fn: Callable[..., Any], options: Options, backend: GraphBackend) -> None:
        self.fn = fn
        self.options = options
        self.backend = backend
        self.names = _parameter_names(fn)

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """A call as leaves and spec. Raises SignatureError for what no graph can take, OutOfBucketError."""
        spec = Spec.of(args, kwargs, self.names, self.backend.device_type)
        leaves = flatten_call(args, kwargs)[0]
        check_inputs(spec, leaves, self.backend.device_type, self.options.mode)
        buckets = self.options.buckets
        call = Call(args, kwargs, leaves, spec, buckets.plan(spec) if isinstance(buckets, Declared) else None)
        assert call.size >= 0  # out of bucket is found here
        return call

    def key(self, call: Call, found: Found, known: Container[Any]) -> Any:
        """What a graph is looked up by: the spec, training flags, the user's own key, and how gradients stand.

        Graphs of calls that do not care how gradients stand are filed under "any"; `known` tells which keys are filed.
        """
        extra = self.options.buckets(*call.args, **call.kwargs) if callable(self.options.buckets) else None
        training = tuple(module.training for _, module in found.submodules())
        grads = "any"
        if self.options.mode == "step":
            first = next((p for _, p in found.parameters() if p.requires_grad), None)
            grads = "none" if first is None or first.grad is None else "some"
        key = (call.spec_at(call.size), training, extra)
        return (*key, "any") if (*key, "any") in known else (*key, grads)

    def device(self, call: Call, found: Found) -> torch.device:
        """The one device of the call. Raises SignatureError for two, NoDeviceError where all tensors are elsewhere."""
        kind = self.backend.device_type
        devices = {leaf.device for leaf in call.leaves if isinstance(leaf, torch.Tensor)}
        devices |= {param.device for _, param in found.parameters()}
        loose = [t for slot in found.loose() if isinstance(t := slot.get(), torch.Tensor)]
        devices |= {t.device for t in loose if t.device.type == kind}
        if not devices:
            return self.backend.current_device()
        if not any(device.type == kind for device in devices):
            raise NoDeviceError(f"neither an argument nor a parameter is on a {kind} device", stage="preflight")
        if len(devices) > 1:
            names = ", ".join(sorted(map(str, devices)))
            raise SignatureError(f"arguments and parameters are on {names}", rule="two-devices", stage="preflight")
        return devices.pop()

    def refuse_wrapped(self, found: Found) -> None:
        """Data-parallel wrappers in mode "autograd", at any depth: they hook into autograd to reduce gradients, and
        the gradients of a replay are added outside of it. Raises SignatureError.
        """
        if self.options.mode != "autograd":
            return
        for path, module in found.submodules():
            if kind := _data_parallel(module):
                raise SignatureError(
                    f"`{path}` is a {kind}, which would not see the gradients of a replay and leave them unreduced",
                    stage="preflight",
                    cure='Guard the whole step (mode="step"), with the communication inside.',
                )

    def warmup(self, found: Found) -> int:
        """How many eager calls come before the capture. DistributedDataParallel reads events on the host in its first
        ten, and builds its buckets anew in the second.
        """
        wrapped = any(_data_parallel(module) for module in found.modules.values())
        return max(self.options.warmup, DDP_WARMUP) if wrapped else self.options.warmup

    @property
    def where(self) -> Where | None:
        """Where the function is defined."""
        target = inspect.unwrap(self.fn.forward if isinstance(self.fn, torch.nn.Module) else self.fn)
        code = getattr(getattr(target, "__func__", target), "__code__", None)
        return Where(code.co_filename, code.co_firstlineno, code.co_name) if code else None


def _data_parallel(module: torch.nn.Module) -> str:
    """Which wrapper a module is, by the name of its class or of one that it derives from; empty for others."""
    return next((cls.__name__ for cls in type(module).__mro__ if cls.__name__ in _DATA_PARALLEL), "")


def _parameter_names(fn: Any) -> tuple[str, ...]:
    target = fn.forward if isinstance(fn, torch.nn.Module) else fn
    try:
        return tuple(inspect.signature(target).parameters)
    except (TypeError, ValueError):
        return ()
