"""Judgement that data alone can't express: small functions over what a walk recorded.

A check says by the annotation of its first parameter what it wants to see: an event type (it is handed every such event
inside a capture in which
Python runs as it stands), `ev.Capture` (every capture), or `Walk` (the whole walk, once). It yields `Report`s that name
a rule; words and severity
come from the rulebook.
This folder is the registry: a function of any module here whose first parameter is so annotated is a check.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any, get_type_hints

from graphlint.checks.base import DIRECT, Report, Walk
from graphlint.flow import events as ev

Check = Callable[..., Iterator[Report]]


@functools.cache
def registry() -> tuple[tuple[Any, Check], ...]:
    """(what it wants to see, the check), in the order of modules and lines."""
    found: list[tuple[Any, Check]] = []
    for info in sorted(pkgutil.iter_modules(__path__), key=lambda info: info.name):
        module = importlib.import_module(f"{__name__}.{info.name}")
        for name, function in vars(module).items():
            if name.startswith("_") or not inspect.isfunction(function) or function.__module__ != module.__name__:
                continue
            hints = get_type_hints(function)
            if hints.get("return") != Iterator[Report]:
                continue
            first = next(iter(inspect.signature(function).parameters))
            found.append((hints[first], function))
    return tuple(found)


def run(walk: Walk) -> Iterator[Report]:
    """Every report of every check on one walk."""
    by_event: dict[type[ev.Event], list[Check]] = {}
    for wanted, check in registry():
        if wanted is Walk:
            yield from check(walk)
        elif wanted is ev.Capture:
            for capture in walk.captures:
                if capture.kind in DIRECT:
                    yield from check(capture, walk)
        else:
            by_event.setdefault(wanted, []).append(check)
    for event in walk.events:
        if event.capture is not None and event.capture.kind in DIRECT:
            for check in by_event.get(type(event), ()):
                yield from check(event, walk)
