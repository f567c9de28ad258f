"""Attributes and calls: what `a.b` is, what `f(x)` enters, how arguments meet parameters."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from graphlint import ir
from graphlint.flow import containers, evidence, graphs, hints, names, objects, pylib, torchlib
from graphlint.flow import events as ev
from graphlint.flow.expressions import Expressions
from graphlint.flow.reading import unresolved
from graphlint.flow.state import MAX_DEPTH, MAX_ENTRIES, OutOfBudget
from graphlint.flow.values import (
    NO,
    NONE,
    READ,
    REST,
    UNKNOWN,
    Bound,
    Cell,
    Choice,
    ClassValue,
    Closure,
    External,
    Holder,
    Host,
    Instance,
    Items,
    Mapping,
    ModuleValue,
    Partial,
    Scope,
    Symbol,
    Tensor,
    Unknown,
    Value,
    Wrapped,
    alternatives,
    const,
    join,
)
from graphlint.link import ClassInfo, Module
from graphlint.regions.region import Region

TAKEN = pylib.TAKEN
MAX_SAME = 2  # times a function is walked with like arguments in one capture


class Calls(Expressions):
    """Attributes, calls, classes. `run_body` and `run_block` belong to the statements."""

    def run_body(self, func: ir.Function) -> None:
        raise NotImplementedError

    # -- attributes

    def attribute(self, obj: Value, name: str, at: ir.Span) -> Value:
        if isinstance(obj, Choice):
            return join(*[self.attribute(one, name, at) for one in obj.values])
        if isinstance(obj, Instance):
            return self._instance_attribute(obj, name, at)
        if isinstance(obj, Tensor):
            return torchlib.tensor_attribute(self.machine, obj, name, at)
        if isinstance(obj, Symbol):
            return torchlib.symbol(f"{obj.name}.{name}")
        if isinstance(obj, ModuleValue):
            found = self.member(obj.module, name)
            return self.read(self.module_scope(obj.module), name, found, at)
        if isinstance(obj, Items) and name in obj.fields:
            return self.read(obj, obj.fields.index(name), obj.slots.get(obj.fields.index(name), UNKNOWN), at)
        if isinstance(obj, External):
            if name in obj.slots:
                return self.read(obj, name, obj.slots[name], at)
            return torchlib.external_attribute(self.machine, obj, name, at)
        if isinstance(obj, ClassValue):
            return self._class_attribute(obj.cls, name, at)
        if isinstance(obj, (Closure, Wrapped, Partial)):
            if isinstance(obj, Partial) and name == "func":
                return obj.func
            if isinstance(obj, Wrapped) and name in ("_orig_mod", "__wrapped__", "module"):
                return obj.func
            if isinstance(obj, Wrapped):
                inner = obj.func
                if isinstance(inner, (Instance, External)) and obj.kind != "lru_cache":
                    found = self.attribute(inner, name, at)
                    if name == "forward" and isinstance(found, Bound):
                        return obj
                    return found
            return Bound(obj, name)
        if isinstance(obj, Bound) and name in ("__self__", "__func__") and not isinstance(obj.receiver, Unknown):
            return obj.receiver if name == "__self__" else (obj.func if isinstance(obj.func, Closure) else UNKNOWN)
        if isinstance(obj, Host) and obj.kind == "device" and name in ("type", "index"):
            return Host("int") if name == "index" else self._device_type(obj)
        if isinstance(obj, Unknown) or (isinstance(obj, Bound) and isinstance(obj.receiver, Unknown)):
            return torchlib.unknown_attribute(self.machine, obj, name, at)
        return Bound(obj, name)

    def _device_type(self, device: Host) -> Host:
        """`device.type`; in a region, a device of which nothing is known is taken for the GPU."""
        if isinstance(device.value, str):
            return Host("str", device.value.partition(":")[0])
        return Host("str", "cuda" if self.open else NO)

    def _instance_attribute(self, obj: Instance, name: str, at: ir.Span) -> Value:
        value = obj.slots.get(name)
        if value is not None:
            if obj.synthetic and unresolved(value) and name in self._tensor_attributes(obj.cls):
                value = self.tensor(at)
                value.storage.pool = None
                obj.slots[name] = value
            return self.read(obj, name, value, at)
        if name == "__class__":
            return ClassValue(obj.cls)
        if name == "__dict__":
            return UNKNOWN
        if name in self.patched:
            holder = self._patched(obj, name)
            if holder is not None:
                value = holder.slots[name]
                return Bound(obj, value) if isinstance(value, Closure) else self.read(holder, name, value, at)
        found = obj.cls.find(name)
        if found is not None:
            return self._method(obj, *found, at)
        for cls in obj.cls.mro():
            if isinstance(cls, ClassInfo) and name in cls.attributes:
                value = self.class_slot(cls, name)
                if value is not None:
                    described = self._described(value, obj, at)
                    return described or self.read(self.class_holder(cls), name, value, at)
        if obj.cls.outside():
            return torchlib.inherited_attribute(self.machine, obj, name, at)
        delegate = obj.cls.find("__getattr__")
        if delegate is not None:
            value = self.enter(self.method_closure(*delegate), [obj, const(name)], {}, at)
            return Unknown(name) if isinstance(value, Host) and value.kind == "none" else value
        return self.missing_attribute(obj, name, at)

    def _patched(self, obj: Instance, name: str) -> Holder | None:
        """The attributes of the class of the object to which the name was written after the class was defined."""
        holders = (self.memo.get(("class", id(cls))) for cls in obj.cls.mro())
        return next((one for one in holders if isinstance(one, Holder) and name in one.slots), None)

    def missing_attribute(self, obj: Instance, name: str, at: ir.Span) -> Value:
        """An attribute nobody has set yet on the walked path: its class may set it in another method, or annotate
        it."""
        for cls in obj.cls.mro():
            if isinstance(cls, ClassInfo):
                for stmt in cls.fields:
                    if any(isinstance(target, ir.Name) and target.id == name for target in stmt.targets):
                        return self.of_annotation(stmt.annotation, cls.module, at)
        return Unknown(name)

    def _method(self, obj: Instance, func: ir.Function, owner: ClassInfo, at: ir.Span) -> Value:
        closure = self.method_closure(func, owner)
        kinds = {_decorator_name(deco) for deco in func.decorators}
        if "staticmethod" in kinds:
            return closure
        if "classmethod" in kinds:
            return Bound(ClassValue(obj.cls), closure)
        if kinds & {"property", "cached_property", "functools.cached_property"}:
            if kinds & {"cached_property", "functools.cached_property"}:
                value = self.enter(closure, [obj], {}, at)
                self.put(obj, func.name, value)
                return value
            return self.enter(closure, [obj], {}, at)
        decorated = self.decorate(closure, func.decorators)
        if isinstance(decorated, Closure):
            return Bound(obj, decorated)
        described = self._described(decorated, obj, at)
        if described is not None:
            return described
        return Partial(decorated, (obj,), {}) if not isinstance(decorated, Unknown) else Bound(obj, closure)

    def _described(self, value: Value, obj: Instance, at: ir.Span) -> Value | None:
        """What a descriptor of the project that stands in the class gives for the object."""
        found = value.cls.find("__get__") if isinstance(value, Instance) else None
        if found is None:
            return None
        return self.enter(self.method_closure(*found), [value, obj, ClassValue(obj.cls)], {}, at)

    def method_closure(self, func: ir.Function, owner: ClassInfo) -> Closure:
        key = ("method", id(func))
        if key not in self.memo:
            self.memo[key] = Closure(
                func, owner.module, owner.scope, owner, self.defaults(func, owner.scope, owner.module)
            )
        found: Closure = self.memo[key]
        return found

    def defaults(self, func: ir.Function, scope: Scope, module: Module) -> dict[str, Value]:
        """Default values are made once, where the function is defined."""
        found: dict[str, Value] = {}
        wanted = [param for param in func.params if param.default is not None]
        if wanted:
            with self.entered(ev.Frame(self.frame, self.frame.name if self.frame else "", module, scope, None)):
                for param in wanted:
                    if param.default is not None:
                        found[param.name] = self.eval(param.default)
        return found

    def class_holder(self, cls: ClassInfo) -> Holder:
        key = ("class", id(cls))
        if key not in self.memo:
            self.memo[key] = Holder()
        holder: Holder = self.memo[key]
        return holder

    def class_slot(self, cls: ClassInfo, name: str) -> Value | None:
        """A class attribute: evaluated on first use."""
        holder = self.class_holder(cls)
        if name not in holder.slots:
            stmt = cls.attributes[name]
            if stmt.value is None:
                return None
            holder.slots[name] = UNKNOWN  # a class attribute that refers to itself
            with self.entered(ev.Frame(self.frame, cls.name, cls.module, cls.scope, None)):
                holder.slots[name] = self.eval(stmt.value)
        return holder.slots[name]

    def _class_attribute(self, cls: ClassInfo, name: str, at: ir.Span) -> Value:
        found = cls.find(name)
        if found is not None:
            func, owner = found
            closure = self.method_closure(func, owner)
            kinds = {_decorator_name(deco) for deco in func.decorators}
            if "classmethod" in kinds:
                return Bound(ClassValue(cls), closure)
            return self.decorate(closure, [deco for deco in func.decorators if _decorator_name(deco) != "staticmethod"])
        for base in cls.mro():
            if isinstance(base, ClassInfo):
                holder = self.class_holder(base)
                if name in holder.slots or name in base.attributes:
                    value = holder.slots.get(name) or self.class_slot(base, name)
                    if value is not None:
                        return self.read(holder, name, value, at)
        if name == "apply" and cls.is_a("torch.autograd.Function", "torch.autograd.function.Function"):
            return Bound(ClassValue(cls), "apply")
        if name in ("__name__", "__qualname__"):
            return const(cls.name)
        base = next(iter(cls.outside()), "")
        if objects.is_layer(base):
            return Symbol(f"{base}.{name}")
        return Unknown(name)

    def member(self, module: Module, name: str) -> Value:
        """`module.name`: a name it binds, or a submodule."""
        scope = self.module_scope(module)
        found = scope.slots.get(name) or self.global_name(scope, name)
        if found is not None:
            return found
        sub = self.project.module(f"{module.name}.{name}" if module.name else name, module.path)
        return ModuleValue(sub) if sub is not None else Unknown(name)

    def module_scope(self, module: Module) -> Scope:
        if module.scope is None:
            module.scope = Scope(module.name, module, None, 0)
            module.scope.slots["__name__"] = const(module.name)
            module.scope.slots["__file__"] = Host("str")
        return module.scope

    def closure(self, func: ir.Function, at: ir.Span) -> Closure:
        scope = self.frame.scope
        return Closure(
            func,
            self.frame.module,
            scope,
            None,
            self.defaults(func, scope, self.frame.module),
            facts={"receiver": self.frame.receiver},
        )

    def decorate(self, value: Value, decorators: Any) -> Value:
        """Applies decorators from the inside out; one that is not understood leaves the function as it is."""
        for deco in reversed(list(decorators)):
            if _decorator_name(deco) in ("property", "staticmethod", "classmethod"):
                continue
            if names.is_kernel_decorator(_decorator_name(deco)):
                return Symbol(
                    f"kernel.{value.func.name}" if isinstance(value, Closure) else "kernel"
                )  # its body is no Python of the host
            func = self.eval(deco) if not isinstance(value, Closure) else self._in_scope(value, deco)
            made = torchlib.decorate(self.machine, func, value, deco.at)
            if made is not None:
                value = made
        return value

    def _in_scope(self, value: Closure, deco: ir.Expr) -> Value:
        with self.entered(ev.Frame(self.frame, value.func.name, value.module, value.scope, None)):
            return self.eval(deco)

    # -- calls

    def capture_callables(self, region: Region, at: ir.Span) -> None:
        if region.kind in ("compile", "graphed-callable") or any(
            frame is self.frame and span == at for one in self.captures for frame, span, _ in one.stack
        ):
            return
        callee = self.eval(region.call.func) if region.call is not None else UNKNOWN
        if isinstance(callee, Closure) or (isinstance(callee, Bound) and isinstance(callee.func, Closure)):
            return  # a function that was walked, and did not capture with these arguments
        if isinstance(callee, ClassValue) and self.whole:
            return  # the program itself comes to the method that captures
        for expression in region.callables[:2]:
            target = self.eval(expression)
            if isinstance(target, (Closure, Bound, Instance, Partial, External)):
                if region.kind == "wrapper":  # wrappers warm up: what is made on first use is there when they capture
                    with graphs.side_stream(self.machine, at):
                        self.call(target, [], {}, at)
                capture = graphs.begin(self.machine, region.kind, region.api, at, None, {}, region.backward)
                capture.mode = "thread_local"
                graphs.in_capture(self.machine, capture, at, functools.partial(self.call, target, [], {}, at))

    def call(self, func: Value, args: list[Value], keywords: dict[str, Value], at: ir.Span) -> Value:
        if isinstance(func, Closure):
            return self.enter(func, args, keywords, at)
        if isinstance(func, Bound):
            return self._call_bound(func, args, keywords, at)
        if isinstance(func, Symbol):
            return self.outside(func.name, None, args, keywords, at)
        if isinstance(func, ClassValue):
            return self.instantiate(func.cls, args, keywords, at)
        if isinstance(func, Instance):
            return self.call_instance(func, args, keywords, at)
        if isinstance(func, Partial):
            return self.call(func.func, [*func.args, *args], {**func.keywords, **keywords}, at)
        if isinstance(func, Wrapped):
            return torchlib.call_wrapped(self.machine, func, args, keywords, at)
        if isinstance(func, External):
            return torchlib.call_external(self.machine, func, args, keywords, at)
        if isinstance(func, Choice):
            found: list[Value] = []
            branches = [self._later(found, one, args, keywords, at) for one in func.values]
            self.fork(*branches)
            return join(*found)
        return self.unknown_call(func, args, keywords, at)

    def _later(
        self, found: list[Value], func: Value, args: list[Value], keywords: dict[str, Value], at: ir.Span
    ) -> Any:
        def run() -> int:
            found.append(self.call(func, args, keywords, at))
            return 0

        return run

    def unknown_call(self, func: Value, args: list[Value], keywords: dict[str, Value], at: ir.Span) -> Value:
        """A call of nobody knows what: counted, and its result unknown."""
        name = func.text if isinstance(func, Unknown) else "?"
        self.miss(at, f"`{name or 'a value'}` could not be resolved")
        # in a region, what is called on the way to an output gives a tensor of the pool, though nothing proves it
        result: Value = self.tensor(at, sure=False) if self.open and not self.whole else UNKNOWN
        self.happen(ev.CallEvent, at, f"?{name}", None, tuple(args), keywords, result)
        return result

    def _call_bound(self, func: Bound, args: list[Value], keywords: dict[str, Value], at: ir.Span) -> Value:
        if isinstance(func.func, Closure):
            return self.enter(func.func, [func.receiver, *args], keywords, at)
        receiver, name = func.receiver, func.func
        if isinstance(receiver, ClassValue) and name == "__new__" and self.made_class is not None:
            return self.made_class
        if isinstance(receiver, ClassValue) and name == "apply":
            return torchlib.call_function_class(self.machine, receiver.cls, args, keywords, at)
        if isinstance(receiver, Tensor):
            return self.outside(f"torch.Tensor.{name}", receiver, args, keywords, at)
        if isinstance(receiver, External):
            return self.outside(f"{receiver.name}.{name}", receiver, args, keywords, at)
        if isinstance(receiver, Instance):
            bases = receiver.cls.outside()
            base = next((one for one in bases if torchlib.defines(one, name)), bases[0] if bases else "?")
            return self.outside(f"{base}.{name}", receiver, args, keywords, at)
        if isinstance(receiver, (Items, Mapping, Host)):
            return containers.method(self.machine, receiver, name, args, keywords, at)
        if isinstance(receiver, (Closure, Wrapped)):
            return torchlib.call_on_callable(self.machine, receiver, name, args, keywords, at)
        self.miss(at, f"`.{name}` of an unknown value could not be resolved")
        return self.outside(f"?.{name}", receiver, args, keywords, at)

    def outside(
        self, name: str, receiver: Value | None, args: list[Value], keywords: dict[str, Value], at: ir.Span
    ) -> Value:
        """A call that leaves the project: the library models say what it gives, the checks what it means."""
        self.budget -= 1
        if self.budget < 0:
            raise OutOfBudget
        event = self.happen(ev.CallEvent, at, name, receiver, tuple(args), keywords, UNKNOWN)
        event.result = torchlib.call(self.machine, event)
        result: Value = event.result
        if (
            isinstance(result, Host)
            and "data" in result.marks
            and not any(mark.startswith(READ) for mark in result.marks)
        ):
            event.result = result = replace(result, marks=result.marks | {f"{READ}{event.clock}"})
        return result

    def call_instance(self, obj: Instance, args: list[Value], keywords: dict[str, Value], at: ir.Span) -> Value:
        for name in self.patched & {"__call__", "forward"}:
            holder = self._patched(obj, name)
            if holder is not None:
                return self.call(holder.slots[name], [obj, *args], keywords, at)
        found = obj.cls.find("__call__")
        if found is not None:
            return self.call(self._method(obj, *found, at), args, keywords, at)
        replaced = obj.slots.get("forward")
        if replaced is not None:
            return self.call(replaced, args, keywords, at)
        found = obj.cls.find("forward")
        if found is not None:
            torchlib.run_hooks(self.machine, obj, "pre", args, at)
            method = self._method(obj, *found, at)
            result = self.call(method, args, keywords, at)
            torchlib.run_hooks(self.machine, obj, "post", [*args, result], at)
            return result
        base = next(iter(obj.cls.outside()), "")
        if objects.is_layer(base):
            torchlib.run_hooks(self.machine, obj, "pre", args, at)
            result = objects.base_forward(self.machine, obj, base, args, keywords, at)
            torchlib.run_hooks(self.machine, obj, "post", [*args, result], at)
            return result
        if base:
            return self.outside(f"{base}.__call__", obj, args, keywords, at)
        return self.unknown_call(Unknown(obj.cls.name), args, keywords, at)

    # -- classes

    def instantiate(
        self, cls: ClassInfo, args: list[Value], keywords: dict[str, Value], at: ir.Span, synthetic: bool = False
    ) -> Value:
        obj = Instance(cls, self.site(at), self.tick(), synthetic)
        return self.init(obj, args, keywords, at)

    def init(self, obj: Instance, args: list[Value], keywords: dict[str, Value], at: ir.Span) -> Value:
        cls = obj.cls
        torchlib.prepare_instance(self.machine, obj, args, keywords, at)
        found = cls.find("__init__")
        if found is not None:
            self.enter(self.method_closure(*found), [obj, *args], keywords, at)
        elif cls.dataclass or cls.is_a("typing.NamedTuple"):
            self._dataclass(obj, args, keywords, at)
        elif cls.outside():
            objects.init_base(self.machine, obj, args, keywords, at)
        return obj

    def _dataclass(self, obj: Instance, args: list[Value], keywords: dict[str, Value], at: ir.Span) -> None:
        names = []
        for cls in reversed(obj.cls.mro()):
            if isinstance(cls, ClassInfo):
                for stmt in cls.fields:
                    if isinstance(stmt.targets[0], ir.Name):
                        names.append((stmt.targets[0].id, stmt, cls))
        for index, (name, stmt, cls) in enumerate(names):
            if index < len(args):
                value = args[index]
            elif name in keywords:
                value = keywords[name]
            elif stmt.value is not None:
                with self.entered(ev.Frame(self.frame, cls.name, cls.module, cls.scope, None)):
                    value = self.eval(stmt.value)
            else:
                value = self.of_annotation(stmt.annotation, cls.module, at)
            self.put(obj, name, value)
        found = obj.cls.find("__post_init__")
        if found:
            self.enter(self.method_closure(*found), [obj], {}, at)

    # -- entering a function

    def enter(self, func: Closure, args: list[Value], keywords: dict[str, Value], at: ir.Span) -> Value:
        """Walks a function with these arguments. Cut off by depth, by recursion, and after a few like calls in one
        capture."""
        self.budget -= 2
        special = torchlib.before_enter(self.machine, func, args, keywords, at)
        if special is not None:
            return special
        if func.func.is_generator and func.wraps != "contextmanager":
            return self._generator(func, args, keywords, at)
        if (self.frame.depth if self.frame else 0) > MAX_DEPTH or self.on_stack(func.func) >= MAX_ENTRIES:
            self.miss(at, f"`{func.func.name}` calls itself deeper than the analysis follows")
            return UNKNOWN
        memo = self._memo_key(func, args, keywords)
        if memo is not None:
            count, known = self.memo.get(memo, (0, UNKNOWN))
            if count >= MAX_SAME:
                value: Value = known
                return value
        frame = self._frame(func, args, keywords, at)
        outer, self.grad_mode = self.grad_mode, func.facts.get("grad_mode", self.grad_mode)
        with self.entered(frame):
            self.run_body(func.func)
        self.grad_mode = outer
        result = join(*frame.returns) if frame.returns else NONE
        if memo is not None:
            self.memo[memo] = (self.memo.get(memo, (0, UNKNOWN))[0] + 1, result)
        return result

    def _memo_key(self, func: Closure, args: list[Value], keywords: dict[str, Value]) -> Any:
        if not self.open and self.whole:
            return None
        capture = self.open[-1].begin if self.open else -1
        shape = (
            tuple(_print(one) for one in args),
            tuple((name, _print(one)) for name, one in sorted(keywords.items(), key=lambda item: item[0])),
        )
        return ("enter", id(func.func), id(func.scope), capture, shape)

    def _frame(self, func: Closure, args: list[Value], keywords: dict[str, Value], at: ir.Span) -> ev.Frame:
        scope = Scope(func.func.qualname, func.module, func.scope, self.tick())
        frame = ev.Frame(self.frame, func.func.qualname, func.module, scope, at)
        frame.func = func.func
        frame.owner = func.owner
        if func.owner is not None and args:
            frame.receiver = args[0]
        else:
            frame.receiver = func.facts.get("receiver")
        self._bind(func, scope, args, keywords, at)
        return frame

    def _bind(self, func: Closure, scope: Scope, args: list[Value], keywords: dict[str, Value], at: ir.Span) -> None:
        spread = bool(args) and isinstance(args[-1], Bound) and args[-1].func == "*"
        positional = list(args[:-1] if spread else args)
        rest: Value = UNKNOWN
        if spread:
            source = args[-1].receiver  # type: ignore[attr-defined]
            rest = join(*source.slots.values()) if isinstance(source, Items) and source.slots else UNKNOWN
        left = dict(keywords)
        more = left.pop("**", None)
        for param in func.func.params:
            if param.kind == "*":
                made = (
                    self.items("tuple", positional, at)
                    if not spread
                    else self.items("tuple", [*positional, rest], at, exact=False)
                )
                scope.slots[param.name] = made
                positional = []
                continue
            if param.kind == "**":
                mapping = Mapping(self.site(at), self.clock)
                mapping.slots.update(left)
                if isinstance(more, Mapping):
                    mapping.slots.update(more.slots)
                elif more is not None:
                    mapping.slots[REST] = UNKNOWN
                scope.slots[param.name] = mapping
                continue
            scope.slots[param.name] = self._argument(func, param, positional, left, more, spread, rest, at)

    def _argument(
        self,
        func: Closure,
        param: ir.Param,
        positional: list[Value],
        left: dict[str, Value],
        more: Value | None,
        spread: bool,
        rest: Value,
        at: ir.Span,
    ) -> Value:
        if param.kind == "pos" and positional:
            value = positional.pop(0)
        elif param.name in left:
            value = left.pop(param.name)
        elif spread and param.kind == "pos":
            value = rest
        elif param.name in func.defaults:
            default = func.defaults[param.name]
            value = join(default, UNKNOWN) if more is not None else default
        else:
            value = Unknown(param.name)
        if isinstance(value, Unknown):
            some = value.some
            value = self.of_annotation(param.annotation, func.module, at, param.name)
            if some and isinstance(value, Choice):
                value = join(*[one for one in value.values if not (isinstance(one, Host) and one.kind == "none")])
            if isinstance(value, Unknown) and param.name in self._tensor_parameters(func):
                value = self.tensor(at)
        return value

    def _tensor_attributes(self, cls: ClassInfo) -> frozenset[str]:
        shared, key = self.project.shared, ("tensors", id(cls.cls))
        if key not in shared:
            shared[key] = evidence.tensor_attributes(cls.cls)
        found: frozenset[str] = shared[key]
        return found

    def _tensor_parameters(self, func: Closure) -> frozenset[str]:
        forward = func.func.name == "forward" and func.owner is not None and func.owner.is_module
        shared, key = self.project.shared, ("tensors", id(func.func), forward)
        if key not in shared:
            shared[key] = evidence.tensor_parameters(func.func, func.module, forward)
        found: frozenset[str] = shared[key]
        return found

    def _generator(self, func: Closure, args: list[Value], keywords: dict[str, Value], at: ir.Span) -> Value:
        """A generator is run to its end at the call; what it yields stands ready to be iterated."""
        if self.on_stack(func.func) >= MAX_ENTRIES:
            return UNKNOWN
        frame = self._frame(func, args, keywords, at)
        with self.entered(frame):
            self.run_body(func.func)
        if not frame.yields:
            return UNKNOWN
        if len(frame.yields) == 1:
            return self.items("iterator", frame.yields, at)
        made = External("generator", self.site(at), self.tick())
        made.made_in = self.capture
        made.facts["items"] = frame.yields[:8]
        made.slots[TAKEN] = const(0)
        return made

    # -- annotations

    def of_annotation(self, annotation: ir.Expr | None, module: Module, at: ir.Span, name: str = "") -> Value:
        """What an annotation promises: a tensor, an object of a project class, a number."""
        if annotation is None:
            return Unknown(name)
        return hints.annotated(self.machine, annotation, module, at, name)


def _decorator_name(deco: ir.Expr) -> str:
    if isinstance(deco, ir.Call):
        deco = deco.func
    parts: list[str] = []
    while isinstance(deco, ir.Attr):
        parts.append(deco.name)
        deco = deco.obj
    if isinstance(deco, ir.Name):
        parts.append(deco.id)
    return ".".join(reversed(parts))


def _print(value: Value) -> Any:
    """A fingerprint: two calls with the same ones are like calls."""
    if isinstance(value, Tensor):
        return ("t", value.device, value.dtype, value.rank, value.sure)
    if isinstance(value, Host):
        return ("h", value.kind, repr(value.value) if value.known else NO)
    if isinstance(value, (Instance, External, Items, Mapping, Scope)):
        return id(value)
    if isinstance(value, Closure):
        return (id(value.func), id(value.scope))
    if isinstance(value, Bound):
        return (_print(value.receiver), value.func if isinstance(value.func, str) else id(value.func.func))
    if isinstance(value, Choice):
        return tuple(_print(one) for one in alternatives(value))
    if isinstance(value, Symbol):
        return value.name
    return type(value).__name__


__all__ = ["Calls", "Cell", "OutOfBudget"]
