"""Statements, scopes and imports: the walk over a program, in the order in which it would run.

One walk begins at a program's own entry (`walk_main`) or, for a region that no entry reaches, at the function around it
with made-up arguments
(`walk_function`). Branches that can't be decided are both walked and joined; loops take two rounds, or their known
length up to a few. See
`state.py` for why it ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graphlint import ir
from graphlint.flow import contexts, graphs
from graphlint.flow import events as ev
from graphlint.flow.branching import Branching
from graphlint.flow.state import MAX_REGION_STEPS, NORMAL, OutOfBudget
from graphlint.flow.values import (
    DEFAULT,
    NONE,
    TRUE,
    UNKNOWN,
    Bound,
    Choice,
    ClassValue,
    Closure,
    External,
    Host,
    Instance,
    Scope,
    Value,
    alternatives,
    const,
)
from graphlint.link import ClassInfo, Module

_START: ir.Span = (1, 0, 1, 0)


class Machine(Branching):
    """Walks programs; what happened stands in `events` and `captures`."""

    def truth(self, value: Value) -> bool | None:
        """Whether Python would take it for true; None when that is not known. Inside a region the environment is the
        default one: checks that a variable switches on are off."""
        if not self.open and any(isinstance(one, Host) and "env" in one.marks for one in alternatives(value)):
            return None
        return super().truth(value)

    def happen(self, kind: type[ev.Event], at: ir.Span, *facts: Any, **more: Any) -> Any:
        """Records an event; inside a region, it is sure when the region comes to it on every way."""
        event = super().happen(kind, at, *facts, **more)
        if self.open and not event.sure and self.doubt <= self.open[-1].doubt:
            event.sure = True
        return event

    # -- entries

    def forget(self) -> None:
        """Lets go of what the walk made: scopes, functions and frames hold each other, and Python finds such rings
        late."""
        for event in self.events:
            event.frame.scope.slots.clear()
        for module in self.project.by_path.values():
            if module.scope is not None:
                module.scope.slots.clear()
        self.__dict__.clear()

    def walk_main(self, module: Module) -> None:
        """Runs a file as `__main__`, top to bottom."""
        self.whole = True
        scope = Scope(module.name, module, None, 0)
        scope.slots["__name__"] = const("__main__")
        scope.slots["__file__"] = Host("str")
        module.scope = scope
        self.frame = ev.Frame(None, "<module>", module, scope, None)
        self._guarded(lambda: self.run_block(module.summary.body))
        self._guarded(self._call_unused)

    def walk_function(self, module: Module, qualname: str, around: bool = True) -> None:
        """Runs the function `qualname` of a module with made-up arguments; a method gets a made-up object, whose other
        methods are walked afterwards."""
        self.budget = MAX_REGION_STEPS
        self.default_device = DEFAULT  # callers may build under `with torch.device("cuda")`
        scope = self.module_scope(module)
        self.frame = ev.Frame(None, "<module>", module, scope, None)
        self._guarded(lambda: self._walk_from(module, qualname, around))
        self._guarded(self._call_unused)

    def _call_unused(self) -> None:
        """What was compiled with CUDA graphs and never called is called once, with tensors where its parameters are
        used as such."""
        for func in list(self.compiled):
            target = func.func
            method = target.cls.find("forward") if isinstance(target, Instance) else None
            closure = self.method_closure(*method) if method else (target.func if isinstance(target, Bound) else target)
            if func.facts.get("graphs") and not func.facts["calls"] and isinstance(closure, Closure):
                known = self._tensor_parameters(closure)
                params = [
                    param for param in closure.func.params if param.kind == "pos" and param.name not in ("self", "cls")
                ]
                args: list[Value] = [
                    self.tensor(_START, "cuda")
                    if param.name in known
                    else self.of_annotation(param.annotation, closure.module, _START, param.name)
                    for param in params
                ]
                self.call(func, args, {}, func.facts["at"])

    def _guarded(self, run: Callable[[], Any]) -> None:
        try:
            run()
        except (OutOfBudget, RecursionError):
            self.unresolved.setdefault((self.frame.module.path, 0), "the walk was cut off by its bound")
        self.journal = None
        self.doubt = 0

    def _walk_from(self, module: Module, qualname: str, around: bool) -> None:
        parts = qualname.split(".")
        head = self.member(module, parts[0])
        if isinstance(head, ClassValue) and len(parts) > 1:
            obj = self.made_up(head.cls, _START)
            if not self._has_captured(
                qualname
            ):  # the constructor may have called it, at the right moment and with the right arguments
                self._call_made_up(self.attribute(obj, parts[1], _START), _START)
            if around and isinstance(obj, Instance):
                self._lifecycle(obj, parts[1])
        elif isinstance(head, (Closure, Bound)) or head is not None:
            self._call_made_up(head, _START)

    def _lifecycle(self, obj: Instance, first: str) -> None:
        """After the method that captures, every other public method once: what they rebind or replay shows."""
        if not self.captures:
            return
        for _ in range(2):  # twice: what one call keeps, the next one overwrites
            seen = len(self.events)
            for cls in obj.cls.mro():
                if not isinstance(cls, ClassInfo):
                    continue
                for name, func in cls.methods.items():
                    if name in (first, "__init__", "__new__", "__del__", "__repr__") or "." in name or func.is_async:
                        continue
                    self._call_made_up(self.attribute(obj, name, _START), _START)
            if not any(isinstance(event, ev.ReplayEvent) for event in self.events[seen:]):
                return

    def _has_captured(self, qualname: str) -> bool:
        return any(frame.name == qualname for capture in self.captures for frame, _, _ in capture.stack)

    def _call_made_up(self, func: Value, at: ir.Span) -> None:
        if isinstance(func, (Closure, Bound, Instance, Choice)):
            args: list[Value] = []
            self.call(func, args, {}, at)
            while self.open:  # begun in one method and ended in another: what the user does between is not seen here
                graphs.end(self, self.open[-1], at)

    def made_up(self, cls: ClassInfo, at: ir.Span) -> Value:
        """An object of a class with unknown constructor arguments; one per class."""
        key = ("made", id(cls))
        if key in self.memo:
            found: Value = self.memo[key]
            return found
        obj = Instance(cls, (cls.module.path, cls.cls.at[0]), self.tick(), True)
        self.memo[key] = obj
        self.init(obj, [], {}, at)
        return obj

    # -- with

    def _With(self, node: ir.With) -> int:
        return self._managed(node, 0)

    def _managed(self, node: ir.With, index: int) -> int:
        if index == len(node.items):
            return self._body_of(node)
        item = node.items[index]
        manager = self.eval(item.context)
        result = [NORMAL]

        def body(entered: Value) -> None:
            if item.target is not None:
                self.assign(item.target, entered, node.at)
            result[0] = self._managed(node, index + 1)

        self.with_manager(manager, body, item.context.at, node.at)
        return result[0]

    def _body_of(self, node: ir.With) -> int:
        """The body of a `with`: a region that the finder knows is one, though its managers did not show it."""
        region = self.known_regions.get((self.frame.module.path, node.at))
        if region is None or self.open or region.kind in ("compile", "wrapper", "graphed-callable"):
            return self.run_block(node.body)
        capture = graphs.begin(self, region.kind, region.api, node.at, None, {})
        capture.mode = "?"
        status: int = graphs.in_capture(self, capture, node.at, lambda: self.run_block(node.body))
        return status

    def with_manager(self, manager: Value, body: Callable[[Value], None], at: ir.Span, whole: ir.Span) -> None:
        """Runs `body` inside a context manager: torch's own, a generator of the project, or a class with
        `__enter__`."""
        options = [
            one
            for one in alternatives(manager)
            if not (isinstance(one, External) and one.name == "contextlib.nullcontext")
        ] or list(alternatives(manager))
        manager = (
            options[0] if len(options) == 1 else next((one for one in options if contexts.captures(one)), options[0])
        )
        if isinstance(manager, Bound) and isinstance(manager.func, Closure) and manager.func.wraps == "pending":
            self._with_generator(manager, body, at)
        elif isinstance(manager, Instance) and manager.cls.find("__enter__"):
            enter, leave = self.attribute(manager, "__enter__", at), self.attribute(manager, "__exit__", at)
            body(self.call(enter, [], {}, at))
            self.call(leave, [NONE, NONE, NONE], {}, at)
        else:
            contexts.with_external(self, manager, body, at, whole)

    def _with_generator(self, manager: Bound, body: Callable[[Value], None], at: ir.Span) -> None:
        func = manager.func
        assert isinstance(func, Closure)
        args: list[Value] = func.facts["args"]
        here = self.frame
        frame = self._frame(func, args, func.facts["keywords"], at)
        done = [False]

        def on_yield(value: Value) -> None:
            if not done[0]:
                done[0] = True
                with self.entered(here):
                    body(value)

        frame.on_yield = on_yield
        with self.entered(frame):
            self.run_body(func.func)
        if not done[0]:
            body(UNKNOWN)


__all__ = ["TRUE", "Machine"]
