"""Which texts can hold a region at all, by plain substring tests: a large project is sifted in a tenth of a second.

A text passes when it holds one of the literal spellings below. They stand in groups behind a gate, a short substring
that every member of the group shares: most texts fail the three gates and are never looked at again. Names that a
project gives to its own capturing helpers are not known beforehand; `calls` finds their users once they are.
"""

from __future__ import annotations

from collections.abc import Iterable

_GATES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "raph",
        (
            "cuda.graph",
            ".graph(",
            "torch.cuda import",
            "graphed_callable",
            "triton.cudagraphs",
            '"cudagraphs"',
            "'cudagraphs'",
            "do_bench_cudagraph",
            "wrap_in_hpu_graph",
            "capture_to_graph",
            "CudaGraphModule",
            "CudaGraphManager(",
            "CUDAGraphWrapper(",
            "accelerator.Graph",
            "npu.graph",
            "xpu.graph",
            "hpu.graph",
            "musa.graph",
            "mlu.graph",
            "device_module.graph",
            ', "graph"',
            ", 'graph'",
        ),
    ),
    (
        "apture",
        ("capture_begin", "begin_capture", "StreamBeginCapture", "ScopedCapture", "capture_safe", "StaticCapture"),
    ),
    ("compile", ("reduce-overhead", "max-autotune")),
)


def anchored(text: str, declared: Iterable[str] = ()) -> bool:
    """Whether `text` holds a spelling that captures, or mentions a name that the project declares as capturing."""
    for gate, spellings in _GATES:
        if gate in text and any(_holds(text, spelling) for spelling in spellings):
            return True
    return mentions(text, declared)


def _holds(text: str, spelling: str) -> bool:
    if spelling not in text:
        return False
    if spelling == "max-autotune":
        return text.count(spelling) > text.count("max-autotune-no-cudagraphs")
    return True


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
