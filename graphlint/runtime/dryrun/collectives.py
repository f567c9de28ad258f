"""Plays `torch.distributed` for one process: every backend is gloo here, and a region's collectives are judged by the
backend that was asked for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from graphlint.runtime.dryrun.session import Session

_DEVICE = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "broadcast",
    "reduce",
    "all_to_all",
    "all_to_all_single",
)
_HOST = (
    "barrier",
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "scatter_object_list",
    "monitored_barrier",
)


def played(session: Session) -> dict[str, Callable[..., Any]]:
    """Replacements for the functions of `torch.distributed`."""
    dist: Any = torch.distributed
    state: dict[str, Any] = {"backends": {}, "warm": set()}
    values: dict[str, Callable[..., Any]] = {
        "init_process_group": functools.partial(_start, state, dist.init_process_group),
        "new_group": functools.partial(_new_group, state, dist.new_group),
    }
    for name in _DEVICE:
        if hasattr(dist, name):
            values[name] = _collective(session, state, name, getattr(dist, name))
    for name in _HOST:
        if hasattr(dist, name):
            values[name] = _blocking(session, state, name, getattr(dist, name))
    return values


def watch_ddp(session: Session, original: Any) -> Any:
    """`DistributedDataParallel.forward`: its reducer takes eleven steps to settle."""

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        done = self.__dict__.setdefault("_graphlint_steps", 0)
        if session.recording and session.region is not None and done < 11:
            session.event("short-warmup", "the region", str(done), session.region.site)
        self.__dict__["_graphlint_steps"] = done + 1
        return original(self, *args, **kwargs)

    return forward


def _start(state: dict[str, Any], original: Any, backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
    state["backends"][None] = backend or "nccl"
    if kwargs.pop("device_id", None) is not None:
        state["warm"].add(None)  # a bound device sets the communicator up at once
    return original("gloo", *args, **kwargs)


def _new_group(state: dict[str, Any], original: Any, *args: Any, backend: str | None = None, **kwargs: Any) -> Any:
    group = original(*args, backend="gloo", **kwargs)
    state["backends"][id(group)] = backend or state["backends"].get(None, "nccl")
    return group


def _collective(session: Session, state: dict[str, Any], name: str, original: Any) -> Any:
    @functools.wraps(original)
    def collective(*args: Any, **kwargs: Any) -> Any:
        group = kwargs.get("group")
        key = None if group is None else id(group)
        if "gloo" in state["backends"].get(key, "nccl"):
            session.event("cpu-collective", f"torch.distributed.{name}")
        elif key not in state["warm"]:
            session.event("first-collective", f"torch.distributed.{name}")
        state["warm"].add(key)
        with session.silence():
            return original(*args, **kwargs)

    return collective


def _blocking(session: Session, state: dict[str, Any], name: str, original: Any) -> Any:
    @functools.wraps(original)
    def blocking(*args: Any, **kwargs: Any) -> Any:
        session.event("blocking-collective", f"torch.distributed.{name}")
        state["warm"].add(None)
        with session.silence():
            return original(*args, **kwargs)

    return blocking
