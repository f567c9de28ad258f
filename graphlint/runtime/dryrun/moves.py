"""What torch functions do on a device that is played by the CPU: placement, transfers, and questions about where a
tensor is.

On a real device everything runs as written; only transfers and reads are noted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from graphlint.runtime.dryrun.records import Op, Role
from graphlint.runtime.dryrun.session import Session

CUDA = "cuda"
Handler = Callable[[Session, str, Any, Any, Any], Any]


def is_device(value: object) -> bool:
    """Whether a `device` argument means the device: `"cuda"`, `"cuda:0"`, `torch.device("cuda")`, `0`."""
    if isinstance(value, torch.device):
        return bool(value.type == CUDA)
    if isinstance(value, str):
        return value.split(":")[0] == CUDA
    return isinstance(value, int) and not isinstance(value, bool)


def is_host(value: object) -> bool:
    """Whether a `device` argument means the CPU."""
    return (value.type if isinstance(value, torch.device) else value) == "cpu"


def default_role(session: Session) -> Role:
    """Where a factory without `device=` puts its memory."""
    return "device" if is_device(torch.get_default_device()) else "host"


def factory_role(session: Session, name: str, args: Any, kwargs: Any) -> Role:
    """Where memory that this call makes out of nothing will live."""
    device = kwargs.get("device")
    if is_device(device):
        return "device"
    if device is not None or not session.emulated:
        return "host"
    if any(session.role(tensor) == "device" for tensor in _shallow(args, kwargs)):
        return "device"
    return default_role(session)


def _shallow(args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Tensors among the arguments, one container deep."""
    found: list[torch.Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(x for x in value if isinstance(x, torch.Tensor))
    return found


def get(session: Session, name: str, func: Any, args: Any) -> Any:
    """Attributes of tensors: `device` and `is_cuda` tell the role, the rest runs as written."""
    if session.emulated and name in _GETTERS and isinstance(args[0], torch.Tensor):
        on_device = session.role(args[0]) == "device"
        if name == "torch.Tensor.device.__get__":
            return torch.device(CUDA, 0) if on_device else func(*args)
        if name == "torch.Tensor.is_cuda.__get__":
            return on_device
        return not on_device
    return func(*args)


_GETTERS = ("torch.Tensor.device.__get__", "torch.Tensor.is_cuda.__get__", "torch.Tensor.is_cpu.__get__")


def run(session: Session, name: str, func: Any, args: Any, kwargs: Any) -> Any:
    """One call of a torch function."""
    handler = _HANDLERS.get(name)
    if handler is not None:
        return handler(session, name, func, args, kwargs)
    if not session.emulated:
        if kwargs.get("pin_memory"):
            session.event("pinned-alloc", name)
        return func(*args, **kwargs)
    return _plain(session, name, func, args, kwargs)


def _plain(session: Session, name: str, func: Any, args: Any, kwargs: Any) -> Any:
    """Any other call: `device=` is answered by the CPU, pinned memory is remembered."""
    device, pinned = kwargs.get("device"), kwargs.pop("pin_memory", False)
    if is_device(device) or (device is None and name in _FACTORIES and default_role(session) == "device"):
        kwargs["device"] = "cpu"
    if pinned:
        session.event("pinned-alloc", name)
    result = func(*args, **kwargs)
    if pinned and isinstance(result, torch.Tensor):
        session.roles.mark(result, "pinned")
    return result


_FACTORIES = frozenset(
    f"torch.{name}"
    for name in (
        *("empty", "zeros", "ones", "full", "rand", "randn", "randint", "randperm", "arange", "linspace", "logspace"),
        *("eye", "tril_indices", "triu_indices", "empty_strided", "scalar_tensor", "range", "normal"),
        *("hann_window", "hamming_window", "bartlett_window", "blackman_window", "kaiser_window"),
        *("fft.fftfreq", "fft.rfftfreq"),
    )
)


def _move(session: Session, name: str, tensor: torch.Tensor, to_device: bool, non_blocking: bool) -> torch.Tensor:
    """A transfer, played by a copy on the CPU; nothing moves where the tensor is there already."""
    role = session.role(tensor)
    if to_device and role != "device":
        session.copied("host-to-device", tensor, role == "pinned", non_blocking, name)
    elif not to_device and role == "device":
        # a non-blocking copy to a fresh host tensor lands in pinned memory
        session.copied("device-to-host", tensor, non_blocking, non_blocking, name)
    else:
        return tensor
    with session.silence():
        moved = tensor.clone()
    session.roles.mark(moved, "device" if to_device else "host")
    if session.observer is not None and session.region is None and not session.elsewhere:
        session.observer.copied(tensor, moved)
    if session.region is not None:
        session.region.born.setdefault(session.roles.identity(moved), len(session.trace.ops))
    return moved


def _cuda(session: Session, name: str, func: Any, args: Any, kwargs: Any) -> Any:
    non_blocking = bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))
    if session.emulated:
        return _move(session, name, args[0], True, non_blocking)
    if not args[0].is_cuda:
        session.copied("host-to-device", args[0], args[0].is_pinned(), non_blocking, name)
    return func(*args, **kwargs)


def _cpu(session: Session, name: str, func: Any, args: Any, kwargs: Any) -> Any:
    if session.emulated:
        return _move(session, name, args[0], False, False)
    if args[0].device.type != "cpu":
        session.copied("device-to-host", args[0], False, False, name)
    return func(*args, **kwargs)


def _to(session: Session, name: str, func: Any, args: Any, kwargs: Any) -> Any:
    """`Tensor.to` in its three spellings: a device, a dtype, another tensor."""
    tensor, rest = args[0], list(args[1:])
    target: Any = kwargs.get("device", kwargs.get("other"))
    if target is None and rest and not isinstance(rest[0], torch.dtype):
        target = rest[0]
    flags = [x for x in rest if isinstance(x, bool)]
    non_blocking = bool(kwargs.get("non_blocking", flags[0] if flags else False))
    if isinstance(target, torch.Tensor):
        to_device: bool | None = session.role(target) == "device"
    else:
        to_device = True if is_device(target) else False if is_host(target) else None
    if not session.emulated:
        _note_move(session, name, tensor, to_device, non_blocking)
        return func(*args, **kwargs)
    moved = tensor if to_device is None else _move(session, name, tensor, to_device, non_blocking)
    rest = ["cpu" if x is target and is_device(x) else x for x in rest]
    if is_device(kwargs.get("device")):
        kwargs["device"] = "cpu"
    return func(moved, *rest, **kwargs)


def _note_move(session: Session, name: str, tensor: torch.Tensor, to_device: bool | None, non_blocking: bool) -> None:
    """On a real device: notes the transfer that `Tensor.to` is about to make."""
    if to_device and tensor.device.type == "cpu":
        session.copied("host-to-device", tensor, tensor.is_pinned(), non_blocking, name)
    elif to_device is False and tensor.device.type != "cpu":
        session.copied("device-to-host", tensor, non_blocking, non_blocking, name)


def _from_data(session: Session, name: str, func: Any, args: Any, kwargs: Any) -> Any:
    """`torch.tensor`, `as_tensor`, `new_tensor`: a device tensor built from host data is a copy of pageable memory."""
    device = kwargs.get("device")
    method = name == "torch.Tensor.new_tensor"
    source = args[1] if method and len(args) > 1 else args[0] if args else kwargs.get("data")
    if device is None:
        on_device = session.role(args[0]) == "device" if method else _data_role(session, name, source) == "device"
    else:
        on_device = is_device(device)
    from_device = isinstance(source, torch.Tensor) and session.role(source) == "device"
    if (session.emulated and is_device(device)) or (session.emulated and device is None):
        kwargs["device"] = "cpu"
    with session.silence():
        result = func(*args, **kwargs)
        if (
            session.emulated
            and name != "torch.tensor"
            and on_device != from_device
            and isinstance(source, torch.Tensor)
        ):
            result = result.clone()
    if session.emulated:
        session.roles.mark(result, "device" if on_device else "host")
    _born(session, result, source)
    if not from_device and _holds_device(session, source):
        session.event("read", name, "element")
    if on_device and not from_device:
        session.copied("host-to-device", result, False, False, name)
    elif from_device and not on_device:
        session.copied("device-to-host", result, False, False, name)
    return result


def _born(session: Session, result: torch.Tensor, source: object) -> None:
    """A tensor built inside the region belongs to it, unless it only wraps the source's memory."""
    region = session.region
    if region is None or (
        isinstance(source, torch.Tensor) and session.roles.identity(source) == session.roles.identity(result)
    ):
        return
    region.born.setdefault(session.roles.identity(result), len(session.trace.ops))


def _data_role(session: Session, name: str, source: object) -> Role:
    if isinstance(source, torch.Tensor):
        return session.role(source)
    return default_role(session) if session.emulated else "host"


def _holds_device(session: Session, source: object) -> bool:
    """Whether a list of data holds device scalars, which are read one by one."""
    return isinstance(source, (list, tuple)) and any(
        isinstance(x, torch.Tensor) and session.role(x) == "device" for x in source
    )


def _read(kind: str) -> Handler:
    """A call that reads the tensor on the host without any operator to show for it."""

    def handler(session: Session, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        if args and isinstance(args[0], torch.Tensor) and session.role(args[0]) == "device":
            session.event(kind, name)
        with session.silence():
            return func(*args, **kwargs)

    return handler


def _numpy(session: Session, name: str, func: Any, args: Any, kwargs: Any) -> Any:
    if session.role(args[0]) == "device":
        session.event("read", name)
        if session.emulated:
            with session.silence():
                args = (args[0].detach().clone(), *args[1:])
    return func(*args, **kwargs)


def _storage(session: Session, name: str, func: Any, args: Any, kwargs: Any) -> Any:
    """`untyped_storage` itself is harmless; pickling a device tensor goes through it and copies to the host."""
    if session.recording and session.role(args[0]) == "device":
        site = session.site()
        if any("_reduce_ex" in part or "serialization" in part for part in site.inside):
            session.event("print", "pickle", site=site)
    return func(*args, **kwargs)


def _pin(session: Session, name: str, func: Any, args: Any, kwargs: Any) -> Any:
    session.event("pinned-alloc", name)
    if not session.emulated:
        return func(*args, **kwargs)
    with session.silence():
        pinned = args[0].clone()
    session.roles.mark(pinned, "pinned")
    return pinned


def _is_pinned(session: Session, name: str, func: Any, args: Any, kwargs: Any) -> Any:
    return session.role(args[0]) == "pinned"


def _get_device(session: Session, name: str, func: Any, args: Any, kwargs: Any) -> Any:
    if session.emulated:
        return 0 if session.role(args[0]) == "device" else -1
    return func(*args, **kwargs)


def _copy_(session: Session, name: str, func: Any, args: Any, kwargs: Any) -> Any:
    """`dst.copy_(src)` across the border is a transfer."""
    target, source = args[0], args[1] if len(args) > 1 else kwargs.get("src", kwargs.get("other"))
    non_blocking = bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))
    if isinstance(source, torch.Tensor):
        _border(session, name, target, source, non_blocking)
    return func(*args, **kwargs)


def _setitem(session: Session, name: str, func: Any, args: Any, kwargs: Any) -> Any:
    """A number written to one element goes through a host tensor on a device, and so does one written through a tensor
    of positions; a slice, a row and a mask are filled in place (measured)."""
    target, index, value = args
    if session.role(target) == "device":
        if isinstance(value, (int, float)) and (_one_element(target, index) or _by_positions(index)):
            session.event("host-index", name, "number")
        elif isinstance(value, torch.Tensor) and value.dim() > 0:
            _border(session, name, target, value, False)
    return func(*args, **kwargs)


def _one_element(target: torch.Tensor, index: Any) -> bool:
    """Whether whole numbers alone pick the place, one for each dimension."""
    parts = index if isinstance(index, tuple) else (index,)
    return len(parts) == target.dim() > 0 and all(isinstance(x, int) and not isinstance(x, bool) for x in parts)


def _by_positions(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    tensors = [x for x in parts if isinstance(x, torch.Tensor) and x.dim() > 0]
    return bool(tensors) and all(x.dtype not in (torch.bool, torch.uint8) for x in tensors)


def _border(session: Session, name: str, target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
    to, of = session.role(target), session.role(source)
    if to == "device" and of in ("host", "pinned"):
        session.copied("host-to-device", source, of == "pinned", non_blocking, name)
    elif to in ("host", "pinned") and of == "device":
        session.copied("device-to-host", source, to == "pinned", non_blocking, name)


def _type(session: Session, name: str, func: Any, args: Any, kwargs: Any) -> Any:
    """`x.type("torch.cuda.FloatTensor")`."""
    if session.emulated and len(args) > 1 and isinstance(args[1], str) and args[1].startswith("torch.cuda."):
        moved = _move(session, name, args[0], True, False)
        return func(moved, args[1].replace("torch.cuda.", "torch."), **kwargs)
    return func(*args, **kwargs)


def _one_hot(session: Session, name: str, func: Any, args: Any, kwargs: Any) -> Any:
    """Without a number of classes the largest value is read on the host."""
    classes = kwargs.get("num_classes", args[1] if len(args) > 1 else -1)
    if classes == -1 and session.role(args[0]) == "device":
        session.event("one-hot", name)
    return func(*args, **kwargs)


def higher_order(session: Session, func: Any, args: Any, kwargs: Any) -> Any:
    """`torch.cond` and its kin: a predicate on the device is noted, then the taken branch runs."""
    if func.name() == "cond":
        predicate, then, other, operands = args
        if isinstance(predicate, torch.Tensor) and session.role(predicate) == "device":
            session.event("cond", "torch.cond")
        with session.silence():
            taken = then if bool(predicate) else other
        return taken(*operands)
    return func(*args, **kwargs)


def play_cond(session: Session, pred: Any, true_fn: Any, false_fn: Any, operands: Any = ()) -> Any:
    """`torch.cond` without compiling anything."""
    return higher_order(session, torch.ops.higher_order.cond, (pred, true_fn, false_fn, operands), {})


def generator_kind(session: Session, generator: Any, op: Op) -> str:
    """`default`, `host` or `custom`: where a draw takes its numbers from."""
    if generator is not None:
        return "custom"
    return "default" if op.on_device or not op.operands else "host"


_HANDLERS: dict[str, Handler] = {
    "torch.Tensor.cuda": _cuda,
    "torch.Tensor.cpu": _cpu,
    "torch.Tensor.to": _to,
    "torch.Tensor.type": _type,
    "torch.Tensor.copy_": _copy_,
    "torch.Tensor.__setitem__": _setitem,
    "torch.Tensor.pin_memory": _pin,
    "torch.Tensor.is_pinned": _is_pinned,
    "torch.Tensor.get_device": _get_device,
    "torch.tensor": _from_data,
    "torch.as_tensor": _from_data,
    "torch.asarray": _from_data,
    "torch.Tensor.new_tensor": _from_data,
    "torch.Tensor.tolist": _read("read"),
    "torch.Tensor.numpy": _numpy,
    "torch.Tensor.__array__": _numpy,
    "torch.Tensor.__repr__": _read("print"),
    "torch.Tensor.__format__": _read("print"),
    "torch.Tensor.untyped_storage": _storage,
    "torch.nn.functional.one_hot": _one_hot,
}
