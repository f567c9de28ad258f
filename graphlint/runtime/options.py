"""What `capture_safe` was asked for, checked once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from graphlint.runtime.buckets import Declared

MODES = ("step", "forward", "autograd")
ERROR_MODES = ("thread_local", "global", "relaxed")
VIOLATIONS = ("raise", "warn", "eager", "recapture")
WATCHES = ("sampled", "full", "off")


@dataclass(frozen=True)
class Options:
    """See `capture_safe` for what each means."""

    mode: str = "step"
    warmup: int = 3
    stream: Any = None
    pool: Any = None
    capture_error_mode: str = "thread_local"
    buckets: Declared | Callable[..., Any] | None = None
    unpad: Mapping[int, int] | None = None
    inputs: str = "copy"
    outputs: str | int = "alias"
    tensor_lr: bool = True
    verify: str | int = "first"
    on_violation: str = "raise"
    max_graphs: int = 8
    watch: str = "sampled"

    def __post_init__(self) -> None:
        _one_of("mode", self.mode, MODES)
        _one_of("capture_error_mode", self.capture_error_mode, ERROR_MODES)
        _one_of("inputs", self.inputs, ("copy", "alias"))
        _one_of("on_violation", self.on_violation, VIOLATIONS)
        _one_of("watch", self.watch, WATCHES)
        if isinstance(self.outputs, str):
            _one_of("outputs", self.outputs, ("alias", "clone"))
        elif self.outputs < 2:
            raise ValueError("outputs: a ring needs a depth of at least 2")
        if isinstance(self.verify, str):
            _one_of("verify", self.verify, ("off", "first"))
        elif self.verify < 1:
            raise ValueError("verify: give a number of steps of at least 1")
        if self.warmup < 1 or self.max_graphs < 1:
            raise ValueError("warmup and max_graphs must be at least 1")
        if isinstance(self.buckets, Declared) and len(self.buckets.sizes) > self.max_graphs:
            raise ValueError(f"max_graphs={self.max_graphs} is below the number of buckets ({len(self.buckets.sizes)})")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: choose from {', '.join(map(repr, allowed))}")
