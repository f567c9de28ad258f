"""What tensor functions and methods give back: device, dtype class, rank, whose memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from graphlint import ir
from graphlint.flow import events as ev
from graphlint.flow import names
from graphlint.flow.values import (
    DEFAULT,
    NO,
    NONE,
    REST,
    UNKNOWN,
    Cell,
    Choice,
    Closure,
    External,
    Host,
    Items,
    Symbol,
    Tensor,
    Unknown,
    Value,
    alternatives,
    const,
    hosts_in,
    tensors_in,
    view,
)

if TYPE_CHECKING:
    from graphlint.flow.machine import Machine


def device_text(machine: Machine, value: Value | None) -> str:
    """`cuda`, `cpu`, `meta` or ? for what was given as a device; "" when none was given."""
    if value is None:
        return ""
    found = {_device(machine, one) for one in alternatives(value)}
    return found.pop() if len(found) == 1 else "?"


def _device(machine: Machine, value: Value) -> str:
    if isinstance(value, Host):
        if value.kind == "none":
            return ""
        if value.known and isinstance(value.value, str):
            kind = value.value.split(":")[0]
            return "cuda" if kind in names.BACKENDS else (kind if kind in ("cpu", "meta") else "?")
        if value.known and isinstance(value.value, int):
            return "cuda"
        if value.kind == "int":
            return "cuda"
    return "?"


def made_on(machine: Machine) -> str:
    """Where a factory without a device puts its tensor. In a region that is the host, unless the program says
    otherwise: default devices are set around the building of models."""
    return "cpu" if machine.default_device == DEFAULT and machine.open else machine.default_device


def dtype_class(value: Value | None) -> str:
    if isinstance(value, Host) and value.kind == "dtype":
        return str(value.value) if value.known else "?"
    if isinstance(value, Symbol):
        return {"builtins.bool": "bool", "builtins.int": "int", "builtins.float": "float"}.get(value.name, "?")
    return "" if value is None else "?"


# --- functions -------------------------------------------------------------------------------------------------------


def function(machine: Machine, event: ev.CallEvent, short: str) -> Value:
    """`torch.NAME(...)` and `torch.nn.functional.NAME(...)`."""
    args, words, at = event.args, event.keywords, event.at
    if short in names.FACTORIES and not (short == "normal" and any(isinstance(one, Tensor) for one in args)):
        return factory(machine, event, short)
    if short in names.LIKE:
        return _like(machine, event)
    if short in names.NO_TENSOR:
        return Host("bool") if short.startswith(("is_", "are_", "equal", "allclose", "can_cast")) else UNKNOWN
    first = args[0] if args else words.get("input", UNKNOWN)
    tensors = [one for arg in [*args, *words.values()] for one in tensors_in(arg)]
    if short in names.MANY_VIEWS and isinstance(first, Tensor):
        return many(machine, first, short, args[1:], words, at)
    if short in names.VIEWS and isinstance(first, Tensor):
        return _viewed(machine, first, short, args[1:], at)
    if short == "where" and len(args) == 1 and not words:
        return machine.items("tuple", [machine.tensor(at, _device_of(tensors), "int", 1)], at)
    if short in ("meshgrid", "broadcast_tensors", "align_tensors"):
        return machine.items("tuple", list(tensors) or [machine.tensor(at)], at, exact=bool(tensors))
    return result(machine, short, tensors, args[1:] if args else (), words, at)


def result(
    machine: Machine, short: str, tensors: list[Tensor], rest: Iterable[Value], words: dict[str, Value], at: ir.Span
) -> Value:
    """The common shape of an operator's result."""
    device = _device_of(tensors)
    dtype = _dtype_of(short, tensors, words)
    rank = _rank_of(short, tensors, list(rest), words)
    grad = any(one.grad for one in tensors) and dtype not in ("int", "bool")  # only floating results have gradients
    sure = any(one.sure for one in tensors) or not tensors
    out = words.get("out")
    if isinstance(out, Tensor):
        machine.happen(ev.InplaceEvent, at, out.storage, short, None, False)
        return out
    made = machine.tensor(at, device, dtype, rank, grad=grad, sure=sure)
    scale = frozenset(cell for one in tensors for cell in one.scale)
    if scale and device in ("cpu", "pinned"):
        made = replace(made, scale=scale)
    if (
        short in names.PAIRS
        and (rank is None or short in ("sort", "topk", "kthvalue", "cummax", "cummin"))
        and _reduces_along(short, list(rest), words)
    ):
        other = machine.tensor(at, device, "int", rank, sure=sure)
        pair = machine.items("minmax", [made, other], at)
        return pair
    if (
        short
        in (
            "svd",
            "eig",
            "eigh",
            "qr",
            "slogdet",
            "lu",
            "lstsq",
            "lu_factor",
            "cholesky_ex",
            "inv_ex",
            "solve_ex",
            "std_mean",
            "var_mean",
            "aminmax",
            "frexp",
            "unique_consecutive",
        )
        and short != "unique_consecutive"
    ):
        return machine.items(
            "tuple",
            [made, machine.tensor(at, device, "?", None, sure=sure), machine.tensor(at, device, "?", None, sure=sure)][
                : 3 if short == "svd" else 2
            ],
            at,
        )
    extra = [words.get(key) for key in ("return_inverse", "return_counts")]
    if short in ("unique", "unique_consecutive") and any(isinstance(one, Host) and one.value is True for one in extra):
        return machine.items("tuple", [made, machine.tensor(at, device, "int", 1)], at, exact=False)
    return made


def _device_of(tensors: list[Tensor]) -> str:
    wide = [one for one in tensors if not (one.rank == 0 and one.on_host)] or tensors
    devices = {"cpu" if one.device == "pinned" else one.device for one in wide}
    if "cuda" in devices:
        return "cuda"
    return devices.pop() if len(devices) == 1 else "?"


def _dtype_of(short: str, tensors: list[Tensor], words: dict[str, Value]) -> str:
    given = dtype_class(words.get("dtype"))
    if given:
        return given
    if short in names.BOOLEAN:
        return "bool"
    if short in names.INTEGER:
        return "int"
    if short in names.FLOATING:
        return "float"
    kinds = {one.dtype for one in tensors}
    if short in ("sum", "cumsum", "prod", "cumprod") and kinds and kinds <= {"int", "bool"}:
        return "int"
    return (
        kinds.pop()
        if len(kinds) == 1 and short not in ("sum", "cumsum", "einsum", "div")
        else ("int" if kinds == {"int"} else "?")
    )


def _reduces_along(short: str, rest: list[Value], words: dict[str, Value]) -> bool:
    if short in ("sort", "topk", "kthvalue", "cummax", "cummin"):
        return True
    return bool(rest and isinstance(rest[0], Host) and rest[0].kind in ("int", "any")) or "dim" in words


def _rank_of(short: str, tensors: list[Tensor], rest: list[Value], words: dict[str, Value]) -> int | None:
    if short in names.REDUCTIONS:
        plain = not [one for one in rest if not isinstance(one, Tensor)] and "dim" not in words and "axis" not in words
        if plain and not (short in ("max", "min") and any(isinstance(one, Tensor) for one in rest)):
            return 0
        if short in ("norm", "std", "var", "quantile") and "dim" not in words and len(rest) <= 1 and short == "norm":
            return 0
        return None
    if short.endswith("_loss") or short in (
        "cross_entropy",
        "binary_cross_entropy",
        "binary_cross_entropy_with_logits",
        "kl_div",
        "dist",
        "dot",
        "trace",
        "vdot",
    ):
        reduction = words.get("reduction")
        return (
            0
            if reduction is None or (isinstance(reduction, Host) and reduction.known and reduction.value != "none")
            else None
        )
    if short in (
        "cat",
        "concat",
        "matmul",
        "mm",
        "bmm",
        "einsum",
        "linear",
        "stack",
        "gather",
        "take",
        "embedding",
        "one_hot",
        "pad",
        "outer",
    ):
        return None
    ranks = [one.rank for one in tensors]
    if not ranks or None in ranks:
        return None
    return max(rank for rank in ranks if rank is not None)


def factory(machine: Machine, event: ev.CallEvent, short: str) -> Value:
    """A tensor made from numbers; on the host unless a device says otherwise."""
    args, words, at = event.args, event.keywords, event.at
    device = device_text(machine, words.get("device")) or made_on(machine)
    if event.name.startswith("torch.cuda."):  # torch.cuda.FloatTensor and its kin
        device = "cuda"
    first = args[0] if args else UNKNOWN
    if short in ("as_tensor", "asarray") and isinstance(first, Tensor) and words.get("device") is None:
        return first
    pinned = words.get("pin_memory")
    if isinstance(pinned, Host) and pinned.value is True:
        device = "pinned"
    given = dtype_class(words.get("dtype"))
    dtype = given or {
        "arange": "int",
        "randint": "int",
        "randperm": "int",
        "LongTensor": "int",
        "IntTensor": "int",
        "BoolTensor": "bool",
    }.get(short, "float")
    dims = None
    listed = short.endswith("Tensor") and isinstance(first, Items)  # the old constructors take sizes or values
    if listed or short in ("tensor", "as_tensor", "scalar_tensor", "asarray", "from_numpy"):
        rank: int | None = _depth(first)
        dtype = given or _literal_dtype(first)
        if isinstance(first, Tensor) and short != "scalar_tensor":
            rank, dtype = first.rank, given or first.dtype
    elif short in ("arange", "linspace", "randperm", "logspace", "range"):
        rank = 1
        if short == "arange" and not given and any(isinstance(one, Host) and one.kind == "float" for one in args):
            dtype = "float"
    elif short == "eye":
        rank = 2
    else:
        size: list[Value] = list(args)
        if short in ("full", "randint"):
            size = list([one for one in args if isinstance(one, Items)][:1])
        dims, rank = _dims(size)
        if short == "full":
            value = args[1] if len(args) > 1 else words.get("fill_value", UNKNOWN)
            dtype = given or _literal_dtype(value)
    scale = (
        frozenset(cell for one in (*args, *words.values()) for host in hosts_in(one) for cell in host.origins)
        if device in ("cpu", "pinned")
        else frozenset()
    )
    made = machine.tensor(at, device, dtype, rank, scale=scale, dims=dims)
    grad = words.get("requires_grad")
    return replace(made, grad=True, leaf=True) if isinstance(grad, Host) and grad.value is True else made


def _dims(size: list[Value]) -> tuple[tuple[int | None, ...] | None, int | None]:
    """The dimensions that `zeros(2, 3)` or `zeros((2, 3))` asks for."""
    if len(size) == 1 and isinstance(size[0], Items):
        if not size[0].exact:
            return None, None
        size = size[0].values
    elif len(size) == 1 and isinstance(size[0], Host) and size[0].kind == "size":
        return None, None
    if any(not isinstance(one, Host) for one in size):
        return None, None if any(not isinstance(one, (Host, Unknown)) for one in size) else len(size)
    dims = tuple(
        one.value if isinstance(one, Host) and one.known and isinstance(one.value, int) else None for one in size
    )
    return dims, len(dims)


def _depth(value: Value) -> int | None:
    if isinstance(value, Host):
        return None if value.kind in ("any", "ndarray", "size") else 0
    if isinstance(value, Items):
        inner = [_depth(one) for one in value.values]
        return None if not inner or inner[0] is None else inner[0] + 1
    return None


def _literal_dtype(value: Value) -> str:
    found = {"bool": "bool", "int": "int", "float": "float"}
    kinds = {found.get(one.kind, "?") for one in hosts_in(value, 3)}
    if kinds == {"bool"}:
        return "bool"
    if kinds and kinds <= {"int", "bool"}:
        return "int"
    return "float" if "float" in kinds else "?"


def _like(machine: Machine, event: ev.CallEvent) -> Value:
    first = event.args[0] if event.args else event.keywords.get("input", UNKNOWN)
    tensors = tensors_in(first)
    device = device_text(machine, event.keywords.get("device")) or (tensors[0].device if tensors else "?")
    dtype = dtype_class(event.keywords.get("dtype")) or (tensors[0].dtype if tensors else "?")
    return machine.tensor(event.at, device, dtype, tensors[0].rank if tensors else None)


# --- attributes and methods ------------------------------------------------------------------------------------------


def attribute(machine: Machine, tensor: Tensor, name: str, at: ir.Span) -> Value | None:
    """A plain attribute of a tensor, or None when the name is a method."""
    if name == "shape":
        if tensor.dims is not None:
            return machine.items(
                "tuple",
                [
                    Host(
                        "int",
                        NO if one is None else one,
                        frozenset(),
                        frozenset({"shape"} if one is not None else {"shape", f"of@{tensor.storage.born}"}),
                    )
                    for one in tensor.dims
                ],
                at,
            )
        return Host("size", marks=frozenset({"shape", f"of@{tensor.storage.born}"}))
    if name == "device":
        known = {"cuda": "cuda", "cpu": "cpu", "pinned": "cpu", "meta": "meta"}.get(_region_device(machine, tensor))
        return Host("device", NO if known is None else known, marks=frozenset({"shape"}))
    if name == "dtype":
        return Host("dtype", tensor.dtype if tensor.dtype != "?" else NO)
    if name == "grad":
        return gradient(machine, tensor, at)
    if name in ("is_cuda", "is_cpu"):
        device = _region_device(machine, tensor)
        return Host("bool") if device in ("?", DEFAULT) else const((device == "cuda") == (name == "is_cuda"))
    if name == "requires_grad":
        return Host("bool")
    if name == "grad_fn":
        return UNKNOWN
    if name in names.HOST_ATTRIBUTES:
        return Host("int" if name == "ndim" else "bool", marks=frozenset({"shape"}))
    if name in names.VIEW_ATTRIBUTES:
        return view(tensor, grad=False) if name == "data" else view(tensor)
    return None


def _region_device(machine: Machine, tensor: Tensor) -> str:
    """Where a tensor lies; in a region, one of which nothing is known is taken to lie on the GPU."""
    return "cuda" if tensor.device in ("?", DEFAULT) and machine.open else tensor.device


def gradient(machine: Machine, tensor: Tensor, at: ir.Span) -> Value:
    """`p.grad`: one gradient per storage, kept in the machine's memory of gradients."""
    known = machine.gradients.slots.get(id(tensor.storage))
    if known is not None:
        if machine.captures and not machine.open:
            machine.happen(ev.ReadEvent, at, Cell(machine.gradients, id(tensor.storage)), known)
            return known
        return machine.read(machine.gradients, id(tensor.storage), known, at)
    made = machine.tensor(at, tensor.device, "float", tensor.rank)
    made.storage.owner = "grad"
    machine.put(machine.gradients, id(tensor.storage), made)
    if machine.captures and not machine.open:
        machine.happen(ev.ReadEvent, at, Cell(machine.gradients, id(tensor.storage)), made)
    return made


def method(machine: Machine, event: ev.CallEvent, tensor: Tensor, name: str) -> Value:
    """`tensor.NAME(...)`."""
    args, words, at = event.args, event.keywords, event.at
    if name in names.HOST_METHODS and not (name == "type" and args):
        if name == "size" and not args:
            return attribute(machine, tensor, "shape", at) or UNKNOWN
        if name in ("size", "dim", "numel", "ndimension", "nelement"):
            if name == "size" and tensor.dims is not None and args and isinstance(args[0], Host) and args[0].known:
                try:
                    one = tensor.dims[args[0].value]
                    return Host("int", NO if one is None else one, frozenset(), frozenset({"shape"}))
                except (IndexError, TypeError):
                    pass
            return Host("int", marks=frozenset({"shape"}))
        return Host("any", marks=frozenset({"shape"}))
    if name in ("item", "tolist", "__int__", "__float__", "__bool__", "numpy"):
        return Host("ndarray" if name == "numpy" else "any", marks=frozenset({"data"}))
    if name in ("cpu", "cuda", "npu", "xpu", "to", "type"):
        return moved(machine, event, tensor, name)
    if name == "pin_memory":
        return machine.tensor(
            at, "pinned" if tensor.on_host else tensor.device, tensor.dtype, tensor.rank, scale=tensor.scale
        )
    if name in names.MANY_VIEWS:
        return many(machine, tensor, name, args, words, at)
    if name == "requires_grad_":
        return _asked(machine, tensor, args[0] if args else words.get("requires_grad"))
    if name in names.VIEWS:
        return _viewed(machine, tensor, name, args, at)
    if name.endswith("_") and not name.endswith("__"):
        return _inplace(machine, event, tensor, name)
    if name in ("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor"):
        device = device_text(machine, words.get("device")) or tensor.device
        return machine.tensor(at, device, dtype_class(words.get("dtype")) or tensor.dtype, None)
    if name in ("backward", "retain_grad", "__setitem__", "record_stream"):
        return NONE
    if name == "register_hook":
        machine.hooks.append(("tensor", tensor, args[0] if args else UNKNOWN))
        return External("torch.utils.hooks.RemovableHandle", machine.site(at), machine.clock)
    if name == "clone":
        return replace(machine.tensor(at, tensor.device, tensor.dtype, tensor.rank, grad=tensor.grad), sure=tensor.sure)
    others = [one for arg in (*args, *words.values()) for one in tensors_in(arg)]
    if name == "nonzero" and isinstance(words.get("as_tuple"), Host):
        return machine.items("tuple", [machine.tensor(at, tensor.device, "int", 1)], at)
    made = result(machine, name, [tensor, *others], args, words, at)
    if (
        isinstance(made, Tensor)
        and name in ("float", "half", "bfloat16", "double", "long", "int", "bool")
        and made.storage is not tensor.storage
    ):
        return replace(made, device=tensor.device, rank=tensor.rank, scale=tensor.scale)
    return made


def moved(machine: Machine, event: ev.CallEvent, tensor: Tensor, name: str) -> Value:
    """`.to(...)`, `.cuda()`, `.cpu()`: the same tensor where nothing moves."""
    target = {"cpu": "cpu", "cuda": "cuda", "npu": "cuda", "xpu": "cuda"}.get(name, "")
    dtype = ""
    for value in (*event.args, *[event.keywords[key] for key in ("device", "dtype", "other") if key in event.keywords]):
        for one in alternatives(value)[:1]:
            if isinstance(one, Tensor):
                target, dtype = one.device, one.dtype
            elif isinstance(one, Host) and one.kind == "dtype":
                dtype = str(one.value) if one.known else "?"
            elif isinstance(one, Symbol):
                dtype = dtype_class(one)
            elif isinstance(one, Host) and one.kind in ("str", "device", "int") and name != "type":
                target = device_text(machine, one) or target
            elif not isinstance(one, Host) and not target and name == "to":
                target = "?"
    if not target:
        target = tensor.device
    same = target == tensor.device and dtype in ("", tensor.dtype)
    if same and target != "?":
        return tensor
    if target == "?" and not dtype and tensor.device == "?":
        return tensor
    made = machine.tensor(
        event.at,
        target,
        dtype if dtype not in ("", "?") else tensor.dtype,
        tensor.rank,
        grad=tensor.grad and dtype not in ("int", "bool"),
        sure=tensor.sure,
    )
    if tensor.device in ("cpu", "pinned") and target in ("cpu", "pinned"):
        made = replace(made, scale=tensor.scale)
    return made


def _viewed(machine: Machine, tensor: Tensor, name: str, args: tuple[Value, ...], at: ir.Span) -> Tensor:
    rank: int | None = None
    if tensor.rank is not None:
        if name in ("unsqueeze",):
            rank = tensor.rank + 1
        elif name in ("select",):
            rank = tensor.rank - 1
        elif name in (
            "detach",
            "contiguous",
            "requires_grad_",
            "transpose",
            "permute",
            "t",
            "narrow",
            "alias",
            "data",
            "real",
            "imag",
        ):
            rank = tensor.rank
    if name in ("view", "reshape", "expand", "view_as", "reshape_as"):
        sizes = args[0].values if len(args) == 1 and isinstance(args[0], Items) and args[0].exact else list(args)
        rank = (
            len(sizes)
            if sizes
            and all(
                isinstance(one, (Host, Unknown)) and not (isinstance(one, Host) and one.kind == "size") for one in sizes
            )
            else None
        )
    if name == "flatten" and not args:
        rank = 1
    grad = (
        False
        if name == "detach"
        else (
            True
            if name == "requires_grad_" and not (args and isinstance(args[0], Host) and args[0].value is False)
            else tensor.grad
        )
    )
    part = tensor.part or name in ("narrow", "select", "diagonal")
    return replace(
        tensor,
        rank=rank,
        dims=tensor.dims if name in ("detach", "contiguous", "requires_grad_", "alias") else None,
        grad=grad,
        part=part,
        leaf=tensor.leaf or (grad and not tensor.grad),
    )


def many(
    machine: Machine, tensor: Tensor, name: str, args: tuple[Value, ...], words: dict[str, Value], at: ir.Span
) -> Value:
    """Several views of one tensor."""
    rank = tensor.rank - 1 if name == "unbind" and tensor.rank else (tensor.rank if name != "unbind" else None)
    piece = replace(tensor, rank=rank, dims=None, part=True)
    count = args[0] if args else words.get("chunks")
    if name == "chunk" and isinstance(count, Host) and isinstance(count.value, int) and 0 < count.value <= 8:
        return machine.items("tuple", [piece] * count.value, at)
    if name in ("split", "split_with_sizes") and isinstance(count, Items) and count.exact:
        return machine.items("tuple", [piece] * len(count.slots), at)
    return machine.items("tuple", [piece], at, exact=False)


def _inplace(machine: Machine, event: ev.CallEvent, tensor: Tensor, name: str) -> Value:
    source = event.args[0] if event.args else None
    machine.happen(ev.InplaceEvent, event.at, tensor.storage, name, source, tensor.part)
    return tensor


def _asked(machine: Machine, tensor: Tensor, wanted: Value | None) -> Tensor:
    """`x.requires_grad_()`: a leaf of autograd from here on; a parameter that is switched off is remembered as
    frozen."""
    if isinstance(wanted, Host) and wanted.value is False:
        machine.frozen.add(tensor.storage)
        return replace(tensor, grad=False)
    return replace(tensor, grad=True, leaf=tensor.leaf or not tensor.grad)


def set_attribute(machine: Machine, tensor: Tensor, name: str, value: Value, at: ir.Span) -> None:
    """`tensor.data = ...`, `tensor.grad = ...`."""
    if name == "grad":
        machine.write(machine.gradients, id(tensor.storage), value, at, "grad")
        if isinstance(value, Tensor) and not value.storage.owner:
            value.storage.owner = "grad"
    elif name == "requires_grad":
        _asked(machine, tensor, value)
    elif name == "data":
        machine.happen(ev.MoveEvent, at, tensor, (tensor.storage,), ".data")


__all__ = [
    "REST",
    "Cell",
    "Choice",
    "Closure",
    "attribute",
    "device_text",
    "dtype_class",
    "factory",
    "function",
    "gradient",
    "many",
    "method",
    "moved",
    "result",
    "set_attribute",
]
