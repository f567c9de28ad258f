"""The two eyes of the dry run, kept thin: one sees what the user writes, one sees every operator. They write records;
the judge judges."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

from graphlint.runtime.dryrun import moves
from graphlint.runtime.dryrun.records import Draw, Event, Op, Operand, Role
from graphlint.runtime.dryrun.roles import generator_identity
from graphlint.runtime.dryrun.session import Call, Session
from graphlint.runtime.dryrun.watchers import fresh_on_device


@functools.lru_cache(maxsize=8192)
def call_name(func: Callable[..., Any]) -> str:
    """`torch.Tensor.item` for a torch function; the bare name where torch does not list it."""
    return resolve_name(func) or f"torch.{getattr(func, '__qualname__', getattr(func, '__name__', 'function'))}"


class CallMode(TorchFunctionMode):
    """Sees every torch function a user calls, with the user's line, and plays the device where there is none."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one call; raises what the call raises."""
        session, kwargs = self._session, dict(kwargs or {})
        try:
            name = call_name(func)
        except TypeError:
            return func(*args, **kwargs)
        if name.endswith(".__get__"):
            return moves.get(session, name, func, args)
        if session.observer is not None and session.region is None and not session.quiet and not session.elsewhere:
            session.observer.used(name, tensors((args, kwargs)))
        session.calls.append(Call(name, moves.factory_role(session, name, args, kwargs)))
        try:
            result = moves.run(session, name, func, args, kwargs)
            if session.emulated and isinstance(result, torch.Tensor) and session.roles.of(result) == "unknown":
                if not any(True for _ in tensors((args, kwargs))):
                    session.roles.mark(result, session.calls[-1].role)  # made without an operator: `from_numpy`
            return result
        finally:
            session.calls.pop()


class OpMode(TorchDispatchMode):
    """Sees every operator, in forward, backward and optimizer, and follows where its results live."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch would load its compiler (1.5 s) to keep it from compiling this class; no mode of ours is compiled."""
        return False

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one operator; raises what the operator raises."""
        kwargs = kwargs or {}
        session = self._session
        if isinstance(func, torch._ops.HigherOrderOperator):
            return moves.higher_order(session, func, args, kwargs)
        if session.elsewhere:
            return self._elsewhere(func, args, kwargs)
        if session.overwritten:
            _stale(session, func, args, kwargs)
        if session.arguments and func._schema.is_mutable:
            _mutated(session, func, args)
        family = _FAMILIES.get(func._schema.name) if session.observer is not None else None
        if family is not None and family not in session.warm:
            _warm(session, family, func)
        if session.emulated and func._schema.name == "aten::lift_fresh" and session.roles.of(args[0]) == "unknown":
            session.roles.mark(args[0], "host")  # fresh from Python: a number, a list, an array
        before = _operands(session, args, kwargs) if session.recording else ()
        site = session.site() if session.recording else None
        region = session.region
        if region is not None and region.undo is not None and func._schema.is_mutable:
            region.undo.before(func, args, kwargs, region.born, session.roles.identity)
        try:
            result = func(*args, **kwargs)
        except Exception:
            if site is not None:
                session.add(_op(session, func, before, (), args, kwargs))
            raise
        self._place(func, args, kwargs, result)
        if session.recording:
            self._record(func, before, args, kwargs, result)
        elif session.observer is not None and session.region is None and not session.quiet:
            session.observer.operator(func, args, kwargs, result)
        return result

    def _elsewhere(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operator on a thread that does not capture: it allocates, or it reads."""
        session = self._session
        result = func(*args, **kwargs)
        self._place(func, args, kwargs, result)
        given = {session.roles.identity(tensor) for tensor in tensors((args, kwargs))}
        fresh = [tensor for tensor in tensors(result) if session.roles.identity(tensor) not in given]
        reads = func._schema.name == "aten::_local_scalar_dense" and session.roles.of(args[0]) == "device"
        if reads or any(session.roles.of(tensor) == "device" for tensor in fresh):
            session.event("thread", session.call or func._schema.name)
        return result

    def _place(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Gives new memory its role: that of the operands, or that of the call which made it."""
        session = self._session
        if not session.emulated:
            return
        given = list(tensors((args, kwargs)))
        roles = [
            session.roles.of(tensor) if func._schema.name == "aten::lift_fresh" else session.role(tensor)
            for tensor in given
        ]
        if "device" in roles:
            _learn(session, func, given, roles)
        if func._schema.name == "aten::_pack_padded_sequence":
            session.roles.mark(result[1], "host")  # batch sizes live on the host on every device
        known = {session.roles.identity(tensor) for tensor in given}
        role = _result_role(session, func, roles)
        lifted = func._schema.name == "aten::lift_fresh"  # its result is its operand, fresh from Python
        for tensor in tensors(result):
            if (lifted or session.roles.identity(tensor) not in known) and session.roles.of(tensor) == "unknown":
                session.roles.mark(tensor, role)

    def _record(self, func: Any, operands: tuple[Operand, ...], args: Any, kwargs: Any, result: Any) -> None:
        session = self._session
        region = session.region
        assert region is not None
        outputs = tuple(session.roles.identity(tensor) for tensor in tensors(result))
        op = _op(session, func, operands, outputs, args, kwargs)
        if region.replayable:
            region.tape.record(op.index, func, args, kwargs, result, region.born, session.roles.identity)
        given = {operand.storage for operand in operands}
        for storage in outputs:
            if storage not in given or op.name == "aten::lift_fresh":
                region.born.setdefault(storage, op.index)
        session.add(op)
        if not session.emulated and op.name in ("aten::lift_fresh", "aten::_to_copy"):
            fresh_on_device(session, op, result)
        if region.kind == "shadow" and isinstance(result, torch.Tensor):
            region.last = result.detach()
        if session.observer is not None:
            session.observer.made(region, result)
        generator = kwargs.get("generator")
        on_device = op.on_device or any(session.roles.of(tensor) == "device" for tensor in tensors(result))
        if generator is not None and on_device and generator_identity(generator) not in region.generators:
            session.event("custom-generator", op.call or op.name, site=op.site)
        if on_device and (func._schema.is_mutable or any(storage not in given for storage in outputs)):
            kind = session.streams.launch()
            if kind:
                session.event(
                    kind, op.call or op.name, site=session.streams.entered.get(session.streams.current, op.site)
                )
        if "nondeterministic_seeded" in op.tags:
            session.trace.draws.append(
                Draw(op.name, moves.generator_kind(session, kwargs.get("generator"), op), op.site)
            )


_FAMILIES = {
    **dict.fromkeys(
        ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::mv", "aten::dot", "aten::addmv"), "cuBLAS"
    ),
    **dict.fromkeys(("aten::convolution", "aten::convolution_backward"), "cuDNN"),
    **dict.fromkeys(("aten::_fft_r2c", "aten::_fft_c2r", "aten::_fft_c2c"), "cuFFT"),
    **dict.fromkeys(
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "aten::_scaled_dot_product_attention_math"), "attention"
    ),
}


def _warm(session: Session, family: str, func: Any) -> None:
    """A library's first call sets it up, which a capture does not allow."""
    if session.region is not None and session.region.kind != "graphed-callable":
        session.event("no-warmup", session.call or func._schema.name, family)
    session.warm.add(family)


def _stale(session: Session, func: Any, args: Any, kwargs: Any) -> None:
    """Memory that a compiled function's later call has overwritten is read."""
    for tensor in tensors((args, kwargs)):
        if session.roles.identity(tensor) in session.overwritten and func._schema.name != "aten::detach":
            overwriting, read = session.overwritten[session.roles.identity(tensor)], session.site()
            note = f"{Path(read.filename).name}:{read.row}"
            session.setup.events.append(Event("overwritten-output", "the compiled function", overwriting, note))
            session.overwritten.clear()
            return


def _mutated(session: Session, func: Any, args: Any) -> None:
    """A compiled function that asks for graphs writes one of its arguments."""
    if args and isinstance(args[0], torch.Tensor) and session.roles.identity(args[0]) in session.arguments:
        session.setup_event("mutated-argument", session.call or func._schema.name)


_COPIES = (
    "aten::copy_",
    "aten::_to_copy",
    "aten::index",
    "aten::index_put_",
    "aten::_index_put_impl_",
    "aten::lift_fresh",
)


def _learn(session: Session, func: Any, given: list[torch.Tensor], roles: list[Role]) -> None:
    """Memory of unknown origin that computes together with device memory must be device memory (copies and indices
    apart)."""
    if func._schema.name in _COPIES:
        return
    for tensor, role in zip(given, roles, strict=True):
        if role == "unknown" and tensor.dim() > 0:
            session.roles.mark(tensor, "device")


def _result_role(session: Session, func: Any, roles: list[Role]) -> Role:
    if func._schema.name == "aten::lift_fresh":
        return "host"
    if "device" in roles:
        return "device"
    if roles:
        return "unknown" if "unknown" in roles else "host"
    if session.calls:
        return session.calls[-1].role
    return "device" if torch._C._current_autograd_node() is not None else moves.default_role(session)


def tensors(tree: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested tuples, lists and dictionaries."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for part in tree:
            yield from tensors(part)
    elif isinstance(tree, dict):
        for part in tree.values():
            yield from tensors(part)


def _operands(session: Session, args: Any, kwargs: Any) -> tuple[Operand, ...]:
    """The tensor arguments as plain values, before the operator changes them."""
    region = session.region
    found = []
    for tensor in tensors((args, kwargs)):
        role, storage = session.role(tensor), session.roles.identity(tensor)
        plain = role in ("host", "pinned") and tensor.dim() == 0 and not tensor.is_complex()
        value = float(tensor) if plain else None
        born = region.born.get(storage, -1) if region else -1
        found.append(Operand(role, str(tensor.dtype), tuple(tensor.shape), storage, born, value))
    return tuple(found)


def _op(
    session: Session, func: Any, operands: tuple[Operand, ...], outputs: tuple[int, ...], args: Any, kwargs: Any
) -> Op:
    backward = torch._C._current_autograd_node() is not None
    return Op(
        index=len(session.trace.ops),
        name=func._schema.name,
        overload=func._overloadname,
        call=session.call,
        operands=operands,
        scalars=tuple(_scalars(func, args, kwargs)),
        outputs=outputs,
        tags=frozenset(str(tag).rsplit(".", 1)[-1] for tag in func.tags),
        site=session.site(),
        forward=session.forward_site() if backward else None,
        backward=backward,
    )


def _scalars(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[str, object]]:
    """The arguments that are no tensors, by their names in the operator's schema."""
    names = [argument.name for argument in func._schema.arguments]
    for name, value in [*zip(names, args, strict=False), *kwargs.items()]:
        if isinstance(value, (list, tuple)) and value and not any(isinstance(x, torch.Tensor) for x in value):
            yield name, tuple(x if isinstance(x, (int, float, bool)) else str(x) for x in value)
        elif isinstance(value, (int, float, bool, complex)) or value is None:
            yield name, value
        elif isinstance(value, (torch.dtype, str)):
            yield name, str(value)
