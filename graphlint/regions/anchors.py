"""Which texts can hold a region at all, by plain substring tests: a large project is sifted in a tenth of a second.

A text passes when it holds one of the literal spellings below. They stand behind gates, short substrings that they
share: most texts fail the three outer gates and are never looked at again. Names that a project gives to its own
capturing helpers are not known beforehand; `uses` finds their users once they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

_MODULES = ("cuda", "npu", "xpu", "hpu", "musa", "mlu", "device_module", "accelerator")


class Gate(NamedTuple):
    """A short substring that all of `behind` share; they are looked for only where it is found."""

    text: str
    behind: tuple[Gate | str, ...]


_SPELLINGS: tuple[Gate, ...] = (
    Gate(
        "raph",
        (
            Gate(".graph", (".graph(", *(f"{device}.graph" for device in _MODULES))),
            Gate("cudagraph", ("triton.cudagraphs", '"cudagraphs"', "'cudagraphs'", "do_bench_cudagraph")),
            Gate("udaGraphM", ("CudaGraphModule", "CudaGraphManager(")),
            Gate('graph"', (', "graph"',)),
            Gate("graph'", (", 'graph'",)),
            Gate("_graph", ("wrap_in_hpu_graph", "capture_to_graph")),
            "graphed_callable",
            "CUDAGraphWrapper(",
            "torch.cuda import",
            "accelerator.Graph",
        ),
    ),
    Gate(
        "apture",
        ("capture_begin", "begin_capture", "StreamBeginCapture", "ScopedCapture", "capture_safe", "StaticCapture"),
    ),
    Gate("compile", ("reduce-overhead", "max-autotune")),
)


def anchored(text: str, declared: Iterable[str] = ()) -> bool:
    """Whether `text` holds a spelling that captures, or mentions a name that the project declares as capturing."""
    return any(_holds(text, gate) for gate in _SPELLINGS) or mentions(text, declared)


def _holds(text: str, wanted: Gate | str) -> bool:
    if isinstance(wanted, Gate):
        return wanted.text in text and any(_holds(text, one) for one in wanted.behind)
    if wanted == "max-autotune":
        return text.count(wanted) > text.count("max-autotune-no-cudagraphs")
    return wanted in text


def mentions(text: str, names: Iterable[str]) -> bool:
    """Whether `text` holds one of `names` (dotted names count by their last part)."""
    return any(all(part in text for part in _telling(name)) for name in names)


def _telling(name: str) -> list[str]:
    """The parts of a dotted name that its users write: the last one, and the class before it."""
    parts = name.split(".")[-2:]
    return parts if len(parts) == 2 and parts[0][:1].isupper() else parts[-1:]


def uses(text: str, users: Iterable[tuple[str, tuple[str, ...]]]) -> bool:
    """Whether `text` may use one of the helpers: it calls the name and holds one of the words that stand near it."""
    return any(
        name in text and calls(text, (name,)) and (not near or any(one in text for one in near)) for name, near in users
    )


def calls(text: str, names: Iterable[str]) -> bool:
    """Whether `text` seems to call, subclass or decorate with one of `names`; a definition or import alone does not."""
    for name in names:
        if name in text and (
            f"{name}(" in text.replace(f"def {name}(", "")
            or f"({name}" in text
            or f"@{name}" in text
            or f"{name} as " in text
        ):
            return True
    return False
