"""Single functions outside the project whose result or effect the walk needs to know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from graphlint import ir
from graphlint.flow import contexts, graphs, names, objects, pylib, stdlib, tensors
from graphlint.flow import events as ev
from graphlint.flow.values import (
    NO,
    NONE,
    REST,
    UNKNOWN,
    External,
    Host,
    Instance,
    Items,
    Mapping,
    Partial,
    Symbol,
    Tensor,
    Value,
    Wrapped,
    alternatives,
    const,
    tensors_in,
)

if TYPE_CHECKING:
    from graphlint.flow.machine import Machine


def _true(machine: Machine, event: ev.CallEvent) -> Value:
    return const(True)


def _false(machine: Machine, event: ev.CallEvent) -> Value:
    return const(False)


def _nothing(machine: Machine, event: ev.CallEvent) -> Value:
    return NONE


def _capturing(machine: Machine, event: ev.CallEvent) -> Value:
    """`is_current_stream_capturing()`: known, for the walk knows whether a region is open."""
    real = any(one.kind != "compile" for one in machine.open)
    return Host("bool", real, marks=frozenset({"capturing"}))


def _compiling(machine: Machine, event: ev.CallEvent) -> Value:
    return const(any(one.kind == "compile" for one in machine.open))


def _device_made(machine: Machine, event: ev.CallEvent) -> Value:
    first = event.args[0] if event.args else event.keywords.get("type", UNKNOWN)
    text = tensors.device_text(machine, first)
    return Host("device", text if text and text != "?" else NO)


def _current_stream(machine: Machine, event: ev.CallEvent) -> Value:
    if machine.streams:
        return machine.streams[-1]
    if machine.default_stream is None:
        machine.default_stream = External("torch.cuda.Stream", ("", 0), 0)
        machine.default_stream.facts["default"] = True
    return machine.default_stream


def _default_stream(machine: Machine, event: ev.CallEvent) -> Value:
    if machine.default_stream is None:
        machine.default_stream = External("torch.cuda.Stream", ("", 0), 0)
        machine.default_stream.facts["default"] = True
    return machine.default_stream


def _collective(machine: Machine, event: ev.CallEvent) -> Value:
    """A collective gives a handle when it is asynchronous, else nothing."""
    wanted = event.keywords.get("async_op")
    if event.name.endswith((".isend", ".irecv")) or (isinstance(wanted, Host) and wanted.value is True):
        return External("torch.distributed.Work", machine.site(event.at), machine.tick())
    return NONE if wanted is None or (isinstance(wanted, Host) and wanted.value is False) else UNKNOWN


def _set_stream(machine: Machine, event: ev.CallEvent) -> Value:
    if event.args:
        if machine.streams:
            machine.streams[-1] = event.args[0]
        else:
            machine.streams.append(event.args[0])
    return NONE


def _parameter(machine: Machine, event: ev.CallEvent) -> Value:
    given = event.args[0] if event.args else event.keywords.get("data", UNKNOWN)
    owner = "buffer" if event.name.endswith("Buffer") else "param"
    for one in tensors_in(given):
        made = machine.tensor(event.at, one.device, one.dtype, one.rank, dims=one.dims)
        break
    else:
        made = machine.tensor(event.at, machine.default_device, "float")
    made.storage.owner = owner
    wanted = event.keywords.get("requires_grad", event.args[1] if len(event.args) > 1 else None)
    needs = owner == "param" and not (isinstance(wanted, Host) and wanted.value is False)
    return replace(made, grad=needs, leaf=needs)


def _default_device(machine: Machine, event: ev.CallEvent) -> Value:
    if event.args:
        machine.default_device = tensors.device_text(machine, event.args[0]) or "cpu"
    return NONE


def _partial(machine: Machine, event: ev.CallEvent) -> Value:
    return Partial(event.args[0], tuple(event.args[1:]), dict(event.keywords)) if event.args else UNKNOWN


def _wraps(machine: Machine, event: ev.CallEvent) -> Value:
    return External("functools.wraps", machine.site(event.at), machine.clock)


def _identity(machine: Machine, event: ev.CallEvent) -> Value:
    return event.args[0] if event.args else UNKNOWN


def _graphed(machine: Machine, event: ev.CallEvent) -> Value:
    return graphs.graphed_callables(machine, event, event.name.startswith("transformer_engine"))


def _guard(machine: Machine, event: ev.CallEvent) -> Value:
    if not event.args:
        return Partial(Symbol("graphlint.capture_safe"), (), dict(event.keywords))
    return Wrapped(event.args[0], "capture-safe", {"at": event.at, "frame": event.frame})


def _checkpoint(machine: Machine, event: ev.CallEvent) -> Value:
    return machine.call(event.args[0], list(event.args[1:]), {}, event.at) if event.args else UNKNOWN


def _deepcopy(machine: Machine, event: ev.CallEvent) -> Value:
    """A copy has memory of its own: modules and tensors are made anew."""
    return _copied(machine, event.args[0] if event.args else UNKNOWN, event.at, {})


def _copied(machine: Machine, value: Value, at: ir.Span, seen: dict[int, Value]) -> Value:
    if id(value) in seen:
        return seen[id(value)]
    if isinstance(value, Tensor):
        fresh = machine.tensor(at, value.device, value.dtype, value.rank, grad=value.grad)
        fresh.storage.owner = value.storage.owner
        return fresh
    made: Any
    if isinstance(value, Instance):
        made = Instance(value.cls, machine.site(at), machine.tick(), value.synthetic)
        made.device = value.device
    elif isinstance(value, External):
        made = External(value.name, machine.site(at), machine.tick())
        made.args, made.keywords, made.device = value.args, value.keywords, value.device
    elif isinstance(value, Items):
        made = Items(value.kind, [], machine.site(at), machine.tick())
        made.exact = value.exact
    elif isinstance(value, Mapping):
        made = Mapping(machine.site(at), machine.tick())
    else:
        return value
    seen[id(value)] = made
    for key, inner in list(value.slots.items()):
        made.slots[key] = _copied(machine, inner, at, seen)
    return made  # type: ignore[no-any-return]


def _deque(machine: Machine, event: ev.CallEvent) -> Value:
    source = event.args[0] if event.args else None
    return machine.items("list", source.values if isinstance(source, Items) else [], event.at, True)


def _ordered(machine: Machine, event: ev.CallEvent) -> Value:
    made = Mapping(machine.site(event.at), machine.tick())
    if event.args and isinstance(event.args[0], Mapping):
        made.slots.update(event.args[0].slots)
    elif event.args:
        pylib.fill(machine, made, event.args[0], event.at)
    made.slots.update({key: one for key, one in event.keywords.items() if key != "**"})
    return made


def _chained(machine: Machine, event: ev.CallEvent) -> Value:
    """A `ChainMap`: the first map that has a key answers."""
    made = Mapping(machine.site(event.at), machine.tick())
    for one in reversed(event.args):
        if isinstance(one, Mapping):
            made.slots.update(one.slots)
        else:
            made.slots[REST] = UNKNOWN
    return made


def _defaultdict(machine: Machine, event: ev.CallEvent) -> Value:
    made = Mapping(machine.site(event.at), machine.tick())
    made.factory = event.args[0] if event.args else None
    return made


def _backward(machine: Machine, event: ev.CallEvent) -> Value:
    """`loss.backward()`: gradients appear, and the Python of the backward pass runs now."""
    for key, gradient in list(machine.gradients.slots.items()):
        if isinstance(gradient, Host) and gradient.kind == "none":
            machine.drop(machine.gradients, key)  # made anew when somebody looks at it
    graphs.run_backward(machine, event.at)
    return NONE


def _autograd_grad(machine: Machine, event: ev.CallEvent) -> Value:
    graphs.run_backward(machine, event.at)
    return machine.items("tuple", [machine.tensor(event.at, "cuda", "float")], event.at, exact=False)


def _clip(machine: Machine, event: ev.CallEvent) -> Value:
    for one in tensors_in(event.args[0]) if event.args else []:
        grad = tensors.gradient(machine, one, event.at)
        for tensor in tensors_in(grad):
            machine.happen(ev.InplaceEvent, event.at, tensor.storage, "clip", None, False)
    return machine.tensor(event.at, "cuda", "float", 0)


def _unflattened(machine: Machine, event: ev.CallEvent) -> Value:
    """`vector_to_parameters(vector, parameters)` puts slices of the vector behind the parameters."""
    storages = tuple(one.storage for value in event.args[1:2] for one in tensors_in(value))
    if storages and machine.captures:
        machine.happen(ev.MoveEvent, event.at, event.args[1], storages, "vector_to_parameters")
    return NONE


def _module_device(machine: Machine, event: ev.CallEvent) -> Value:
    return Symbol("torch.cuda")


def _apply(machine: Machine, event: ev.CallEvent) -> Value:
    """`functional_call(module, parameters, args)`."""
    given = event.args[2] if len(event.args) > 2 else event.keywords.get("args", UNKNOWN)
    inputs = list(given.values) if isinstance(given, Items) and given.kind == "tuple" and given.exact else [given]
    return machine.call(event.args[0], inputs, {}, event.at) if event.args else UNKNOWN


def _logger(machine: Machine, event: ev.CallEvent) -> Value:
    return External("logging.Logger", machine.site(event.at), machine.tick())


def _numpy_generator(machine: Machine, event: ev.CallEvent) -> Value:
    return External("numpy.random.Generator", machine.site(event.at), machine.tick())


def _namespace(machine: Machine, event: ev.CallEvent) -> Value:
    """An object with what it is given as its attributes."""
    made = External(event.name, machine.site(event.at), machine.tick())
    made.slots.update({key: one for key, one in event.keywords.items() if key != "**"})
    return made


def _is_tensor(machine: Machine, event: ev.CallEvent) -> Value:
    answers = {pylib.is_instance(one, "Tensor") for one in (alternatives(event.args[0]) if event.args else ())}
    answer = answers.pop() if len(answers) == 1 else None
    return Host("bool") if answer is None else const(answer)


def _tree_map(machine: Machine, event: ev.CallEvent) -> Value:
    if len(event.args) < 2:
        return UNKNOWN
    made = _mapped(machine, event.args[0], event.args[1], [*event.args[2:]], event.at, 3)
    return made


def _mapped(machine: Machine, func: Value, tree: Value, more: list[Value], at: ir.Span, depth: int) -> Value:
    if isinstance(tree, Items) and depth:
        others = [
            one.values if isinstance(one, Items) and len(one.slots) == len(tree.slots) else [UNKNOWN] * len(tree.slots)
            for one in more
        ]
        values = [
            _mapped(machine, func, one, [column[index] for column in others], at, depth - 1)
            for index, one in enumerate(tree.values)
        ]
        return machine.items(tree.kind, values, at, tree.exact)
    if isinstance(tree, Mapping) and depth:
        made = Mapping(machine.site(at), machine.tick())
        for key, one in list(tree.slots.items()):
            rest = [other.slots.get(key, UNKNOWN) if isinstance(other, Mapping) else UNKNOWN for other in more]
            made.slots[key] = _mapped(machine, func, one, rest, at, depth - 1)
        return made
    return machine.call(func, [tree, *more], {}, at)


def _foreach_copy(machine: Machine, event: ev.CallEvent) -> Value:
    for one in tensors_in(event.args[0]) if event.args else []:
        machine.happen(
            ev.InplaceEvent, event.at, one.storage, "copy_", event.args[1] if len(event.args) > 1 else None, False
        )
    return NONE


HANDLERS: dict[str, Callable[[Any, ev.CallEvent], Value]] = {
    "torch.cuda.is_available": _true, "torch.cuda.is_initialized": _true, "torch.backends.cuda.is_built": _true,
    "torch.cuda.is_current_stream_capturing": _capturing, "torch.cuda.graphs.is_current_stream_capturing": _capturing,
    "torch.compiler.is_compiling": _compiling, "torch._dynamo.is_compiling": _compiling,
    "torch.compiler.is_dynamo_compiling": _compiling,
    "torch.jit.is_scripting": _false, "torch.jit.is_tracing": _false, "torch.onnx.is_in_onnx_export": _false,
    "torch.device": _device_made, "torch.cuda.current_stream": _current_stream,
    "torch.cuda.default_stream": _default_stream,
    **{f"torch.distributed.{name}": _collective for name in names.COLLECTIVES},
    "torch.cuda.set_stream": _set_stream, "torch.nn.Parameter": _parameter, "torch.nn.Buffer": _parameter,
    "torch.set_default_device": _default_device,
    **stdlib.HANDLERS,
    "functools.partial": _partial, "functools.wraps": _wraps, "functools.wraps.__call__": _identity,
    "functools.update_wrapper": _identity,
    "torch.cuda.make_graphed_callables": _graphed, "transformer_engine.pytorch.make_graphed_callables": _graphed,
    "torch.compile": graphs.compiled, "graphlint.capture_safe": _guard,
    "torch.utils.checkpoint.checkpoint": _checkpoint,
    "collections.ChainMap": _chained, "torch.vmap": _identity, "torch.func.vmap": _identity,
    "builtins.type.__new__": lambda machine, event: machine.made_class or UNKNOWN,
    "numpy.random.default_rng": _numpy_generator,
    "types.SimpleNamespace": _namespace, "argparse.Namespace": _namespace,
    "logging.getLogger": _logger, "logging.Logger.getChild": _logger, "copy.deepcopy": _deepcopy,
    "copy.copy": _deepcopy, "collections.deque": _deque, "collections.OrderedDict": _ordered,
    "collections.defaultdict": _defaultdict,
    "torch.Tensor.backward": _backward, "torch.autograd.backward": _backward, "torch.autograd.grad": _autograd_grad,
    "?.backward": _backward,
    "torch.nn.utils.clip_grad_norm_": _clip, "torch.nn.utils.clip_grad_value_": _clip,
    "torch.get_device_module": _module_device,
    "torch.is_tensor": _is_tensor, "torch.utils._pytree.tree_map": _tree_map, "torch._foreach_copy_": _foreach_copy,
    "torch.cuda.synchronize": _nothing, "torch.cuda.set_device": _nothing, "torch.cuda.empty_cache": _nothing,
    "torch.func.functional_call": _apply, "torch.cuda.current_device": lambda machine, event: Host("int"),
    "torch.no_grad": lambda machine, event: External("torch.no_grad", ("", 0), machine.clock),
    "torch.inference_mode": objects.made, "torch.set_grad_enabled": contexts.set_grad,
    "torch.enable_grad": lambda machine, event: External("torch.enable_grad", ("", 0), machine.clock),
    "torch.no_grad.__call__": _identity, "torch.inference_mode.__call__": _identity,
    "torch.enable_grad.__call__": _identity, "torch.amp.autocast.__call__": _identity,
    "torch.Generator": objects.made, "typing.cast": lambda machine, event: event.args[-1] if event.args else UNKNOWN,
    "torch.cuda.graph": objects.made, "torch.cuda.stream": objects.made, "torch.npu.graph": objects.made,
    "torch.xpu.graph": objects.made, "torch.musa.graph": objects.made, "torch.hpu.graph": objects.made,
    "torch.mlu.graph": objects.made,
    "torch.amp.autocast": objects.made, "torch.cuda.graph_pool_handle": objects.made,
    "torch.nn.utils.vector_to_parameters": _unflattened,
    "torch.nn.utils.convert_parameters.vector_to_parameters": _unflattened,
    "torch.npu.stream": objects.made, "torch.xpu.stream": objects.made, "contextlib.nullcontext": objects.made,
    "contextlib.suppress": objects.made, "pytest.raises": objects.made,
}  # fmt: skip
