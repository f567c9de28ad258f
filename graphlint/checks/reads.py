"""What Python reads from a tensor without a call that says so: tests, comparisons, indices, formatting, loops."""

from __future__ import annotations

from collections.abc import Iterator

from graphlint.checks.base import Report, Walk, at, of_class, on_device, on_host, surely_on_device
from graphlint.flow import events as ev
from graphlint.flow.values import External, Host, Items, Mapping, Tensor, Value, alternatives

_TESTS = {
    "if": "`if`", "ternary": "conditional expression", "assert": "`assert`", "not": "`not`", "and": "`and`",
    "or": "`or`", "comprehension": "condition of a comprehension", "match": "`match`", "while": "`while`",
}  # fmt: skip


def data_dependent_branch(event: ev.TestEvent, walk: Walk) -> Iterator[Report]:
    """A branch asks for the value of a device tensor."""
    if on_device(event.value) is not None:
        rule = "data-dependent-loop" if event.how == "while" else "data-dependent-branch"
        yield at(event, rule, why=_TESTS[event.how])


def compared_on_host(event: ev.CompareEvent, walk: Walk) -> Iterator[Report]:
    """Python compares tensors by itself: a chain, `in`, `min` over a list of tensors."""
    if not any(on_device(one) is not None for value in event.values for one in _inner(value)):
        return
    why = {
        "chain": "joins its comparisons with `and`, which reads each on the host",
        "in": "compares in Python and reads the result on the host",
        "not in": "compares in Python and reads the result on the host",
    }.get(event.how, "compares element by element in Python; each comparison waits for the GPU")
    yield at(event, "host-sync", why=why)


def _inner(value: Value) -> list[Value]:
    return list(value.values) if isinstance(value, Items) else [value]


def refused_capture(event: ev.RefuseEvent, walk: Walk) -> Iterator[Report]:
    """A guard of the code itself: it raises where it is captured."""
    if event.sure:
        report = at(event, "hidden-check", why="refuses the capture, for what comes next needs the host")
        report.help = "Give the call what it asks for, or make it before the region and keep its result."
        yield report


def formatted_tensor(event: ev.FormatEvent, walk: Walk) -> Iterator[Report]:
    """A device tensor is formatted into a string."""
    if on_device(event.value) is not None:
        yield at(event, "printed-tensor", why="formats a device tensor, so its values are read on the host")


def loop_over_range(event: ev.CallEvent, walk: Walk) -> Iterator[Report]:
    """`range(tensor)`."""
    if event.name == "builtins.range" and any(on_device(one) is not None for one in event.args):
        yield at(event, "data-dependent-loop")


def indexed(event: ev.IndexEvent, walk: Walk) -> Iterator[Report]:
    """What an index asks of the host: sizes of masks, numbers in 0-dim tensors, indices that lie on the host."""
    for obj in alternatives(event.obj):
        if isinstance(obj, Tensor):
            found = list(_tensor_index(obj, event))
        elif (isinstance(obj, (Items, Host)) and not (isinstance(obj, Host) and obj.kind == "any")) or of_class(
            obj, *_NUMBERED
        ):
            found = (
                [at(event, "scalar-index")] if surely_on_device(event.index) or _slice_of_tensor(event.index) else []
            )
        else:
            continue
        yield from found[:1]


_NUMBERED = (
    "torch.nn.ModuleList",
    "torch.nn.Sequential",
    "torch.nn.ParameterList",
    "range",
)  # what takes numbers for an index


def _slice_of_tensor(index: Value) -> bool:
    return (
        isinstance(index, External) and index.name == "slice" and any(on_device(one) is not None for one in index.args)
    )


def _tensor_index(obj: Tensor, event: ev.IndexEvent) -> Iterator[Report]:
    parts = event.index.values if isinstance(event.index, Items) and event.index.kind == "tuple" else [event.index]
    for part in parts:
        if _slice_of_tensor(part):
            yield at(event, "scalar-index")
        for one in alternatives(part):
            if isinstance(one, Tensor) and one.sure:
                yield from _by_tensor(obj, one, event)
            elif isinstance(one, Items) and one.kind == "list" and not obj.on_host and (one.slots or not one.exact):
                if not any(isinstance(inner, Tensor) for inner in one.values):
                    yield at(event, "host-index", why="builds the index on the host and copies it to the GPU")
            elif isinstance(one, External) and one.name == "range" and not obj.on_host:
                yield at(event, "host-index", why="builds the index on the host and copies it to the GPU")
            elif isinstance(one, Host) and one.kind == "ndarray" and not obj.on_host:
                yield at(event, "host-index", why="copies a NumPy index to the GPU")
    if event.stored is not None and not obj.on_host and obj.rank is not None:
        numbers = [part for part in parts if isinstance(part, Host) and part.kind in ("int", "any")]
        whole = len(numbers) == len(parts) == obj.rank
        if whole and isinstance(event.stored, Host) and event.stored.kind in ("int", "float", "bool", "any"):
            yield at(event, "host-index", why="writes one element from the host, which is a copy from pageable memory")


def _by_tensor(obj: Tensor, index: Tensor, event: ev.IndexEvent) -> Iterator[Report]:
    if obj.on_host:
        if index.device == "cuda":
            yield at(event, "scalar-index")
        return
    if obj.device == "?" and index.device == "?" and not (obj.sure and index.sure):
        return
    if index.on_host:
        if index.rank != 0:
            yield at(event, "host-index", why="copies an index on the CPU to the GPU")
        return
    if index.dtype == "bool":
        if event.stored is None:
            yield at(
                event,
                "dynamic-shape",
                why="selects as many elements as the mask has true ones, so the count is brought to the host",
            )
        elif any(
            isinstance(one, Tensor) and not one.on_host for one in alternatives(event.stored)
        ):  # one value on the host is a plain fill
            yield at(
                event,
                "dynamic-shape",
                why="writes as many elements as the mask has true ones, so the count is brought to the host",
            )
    elif index.rank == 0 and index.dtype == "int" and event.stored is None:
        yield at(event, "scalar-index")
    elif (
        event.stored is not None
        and isinstance(event.stored, Host)
        and index.dtype == "int"
        and event.stored.kind in ("int", "float", "bool")
    ):
        yield at(event, "host-index", why="copies the number from the host for an index that lies on the device")


def copied_from_host(event: ev.CallEvent, walk: Walk) -> Iterator[Report]:
    """Pageable host memory goes to the GPU, or back: factories with a device, `.to`, `.cuda`, `copy_`."""
    name = event.name
    receiver = event.receiver
    if (
        name in ("torch.tensor", "torch.as_tensor", "torch.asarray", "torch.scalar_tensor")
        and "device" in event.keywords
    ):
        yield from _factory(event, walk)
    elif isinstance(receiver, Tensor):
        yield from _moved(event, receiver, name.rpartition(".")[2], walk)
    elif (
        name.startswith("torch.cuda.")
        and name.endswith("Tensor")
        and event.args
        and not all(isinstance(one, Host) and one.kind in ("int", "size") for one in event.args)
    ):
        yield at(event, "host-copy", why="copies the values from pageable host memory to the GPU")


def module_moved(event: ev.MoveEvent, walk: Walk) -> Iterator[Report]:
    """A module is moved to the GPU in the region: its parameters come from pageable host memory."""
    if event.copied:
        yield at(event, "host-copy", why="copies parameters from pageable host memory to the GPU")


def _factory(event: ev.CallEvent, walk: Walk) -> Iterator[Report]:
    if event.name == "torch.scalar_tensor":
        return
    made = event.result
    first = event.args[0] if event.args else event.keywords.get("data")
    if not isinstance(made, Tensor) or made.on_host or made.device == "meta":
        return
    if isinstance(first, Items) and first.exact and not first.slots:
        return  # nothing is copied, and nothing waits
    if first is not None and any(isinstance(one, Tensor) and not one.on_host for one in alternatives(first)):
        return
    if (
        first is not None
        and any(not isinstance(one, (Host, Items, Tensor)) for one in alternatives(first))
        and event.name != "torch.tensor"
    ):
        return
    why = (
        "builds the values in pageable host memory and copies them to the GPU"
        if event.name == "torch.tensor"
        else "copies the values from pageable host memory to the GPU"
    )
    yield at(event, "host-copy", why=why)


def _moved(event: ev.CallEvent, tensor: Tensor, name: str, walk: Walk) -> Iterator[Report]:
    result = event.result
    non_blocking = event.keywords.get("non_blocking")
    waits = not (isinstance(non_blocking, Host) and non_blocking.known and non_blocking.value is True)
    if not waits or non_blocking is None:
        waits = not any(isinstance(one, Host) and one.value is True for one in event.args[1:])
        waits = waits and not (isinstance(non_blocking, Host) and non_blocking.value is True)
    if tensor.dims is not None and 0 in tensor.dims:
        return
    if (
        name in ("to", "cuda", "type", "type_as")
        and tensor.on_host
        and isinstance(result, Tensor)
        and result.device == "cuda"
    ):
        if tensor.device == "cpu":
            yield at(event, "host-copy", why="copies pageable host memory to the GPU (with `non_blocking=True` too)")
        elif waits:
            yield at(event, "host-copy", why="waits for the copy of pinned memory, as `non_blocking=True` is missing")
    elif name == "copy_" and event.args:
        source = event.args[0]
        if tensor.device == "cuda" and on_host(source):
            pinned = all(isinstance(one, Tensor) and one.device == "pinned" for one in alternatives(source))
            if not pinned or waits:
                yield at(
                    event,
                    "host-copy",
                    why="copies pageable host memory to the GPU"
                    if not pinned
                    else "waits for the copy of pinned memory, as `non_blocking=True` is missing",
                )
        elif tensor.on_host and surely_on_device(source) is not None and (tensor.device == "cpu" or waits):
            yield at(event, "host-copy", why="copies from the GPU to host memory and waits for it")
    elif name == "new_tensor" and not tensor.on_host and isinstance(result, Tensor) and not result.on_host:
        yield at(event, "host-copy", why="builds the values in pageable host memory and copies them to the GPU")


__all__ = [
    "Mapping",
    "compared_on_host",
    "copied_from_host",
    "data_dependent_branch",
    "formatted_tensor",
    "indexed",
    "loop_over_range",
]
