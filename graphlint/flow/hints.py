"""What an annotation promises: a tensor, a number, an object of a class of the project."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphlint import ir
from graphlint.flow import modules
from graphlint.flow.values import (
    NONE,
    REST,
    ClassValue,
    External,
    Host,
    Mapping,
    ModuleValue,
    Symbol,
    Unknown,
    Value,
    join,
)
from graphlint.link import Module

if TYPE_CHECKING:
    from graphlint.flow.machine import Machine


_PLAIN = {"int": "int", "float": "float", "bool": "bool", "str": "str"}


def annotated(machine: Machine, annotation: ir.Expr, module: Module, at: ir.Span, name: str) -> Value:
    """The value that an annotation promises; a class of the project gives one made-up object per class."""
    if isinstance(annotation, ir.Const):
        return _from_text(machine, str(annotation.value), module, at, name)
    if isinstance(annotation, ir.Binary) and annotation.op == "|":
        return join(
            annotated(machine, annotation.left, module, at, name),
            annotated(machine, annotation.right, module, at, name),
        )
    if isinstance(annotation, ir.Subscript):
        return _generic(machine, annotation, module, at, name)
    if isinstance(annotation, ir.Const) and annotation.value is None:
        return NONE
    dotted = _dotted(annotation)
    return _from_text(machine, dotted, module, at, name) if dotted else Unknown(name)


def _dotted(node: ir.Expr) -> str:
    if isinstance(node, ir.Name):
        return node.id
    if isinstance(node, ir.Attr):
        inner = _dotted(node.obj)
        return f"{inner}.{node.name}" if inner else ""
    return ""


def _generic(machine: Machine, node: ir.Subscript, module: Module, at: ir.Span, name: str) -> Value:
    head = _dotted(node.obj).rpartition(".")[2]
    inner = node.index.items if isinstance(node.index, ir.Sequence) else (node.index,)
    if head == "Optional":
        return join(annotated(machine, inner[0], module, at, name), NONE)
    if head == "Union":
        return join(*[annotated(machine, one, module, at, name) for one in inner])
    if head in ("list", "List", "Sequence", "tuple", "Tuple", "Iterable"):
        return machine.items("list", [annotated(machine, inner[0], module, at, name)], at, exact=False)
    if head in ("dict", "Dict", "Mapping") and len(inner) == 2:
        made = Mapping(machine.site(at), machine.clock)
        made.slots[REST] = annotated(machine, inner[1], module, at, name)
        return made
    return Unknown(name)


def _from_text(machine: Machine, text: str, module: Module, at: ir.Span, name: str) -> Value:
    last = text.rpartition(".")[2]
    if last in ("Tensor", "FloatTensor", "LongTensor", "BoolTensor", "IntTensor") and "np" not in text:
        dtype = {"LongTensor": "int", "IntTensor": "int", "BoolTensor": "bool", "FloatTensor": "float"}.get(last, "?")
        return machine.tensor(at, "?", dtype)
    if text in _PLAIN:
        return Host(_PLAIN[text])
    if text == "None":
        return NONE
    if last == "device":
        return Host("device")
    if last == "dtype":
        return Host("dtype")
    if not text or not text.replace(".", "").replace("_", "").isalnum():
        return Unknown(name)
    parts = text.split(".")
    value = machine.member(module, parts[0])
    for part in parts[1:]:
        value = (
            machine.attribute(value, part, at)
            if not isinstance(value, ModuleValue)
            else machine.member(value.module, part)
        )
    if isinstance(value, ClassValue):
        return machine.made_up(value.cls, at)
    if isinstance(value, Symbol) and modules.is_module_name(value.name) and value.name != "torch.nn.Module":
        return External(value.name, machine.site(at), machine.clock)
    return Unknown(name)
