"""What a watched or a captured call shows that no replay can do: each refusal names the place, the reason, the cure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from graphlint.runtime.backend import CaptureFailed, UncapturedWork
from graphlint.runtime.errors import CaptureError, SignatureError, Where, error_of
from graphlint.runtime.inputs import shared_memory
from graphlint.runtime.translate import translate

if TYPE_CHECKING:
    from graphlint.runtime.admit import Admission


def refuse_watched(admission: Admission) -> None:
    """Looks at what the watched call did, before it runs for the caller. Raises CaptureError."""
    _refuse_overlap(admission)
    _refuse_steps(admission)


def _refuse_overlap(admission: Admission) -> None:
    name = shared_memory(admission.call.spec, admission.call.leaves, set(admission.watched.writes))
    if name:
        raise SignatureError(
            f"argument `{name}` shares memory with another argument, and the call writes it",
            rule="overlapping-input",
            stage="warmup",
            where=admission.where,
        )


def _refuse_steps(admission: Admission) -> None:
    """A replay steps no scheduler and takes nothing from an iterator."""
    for label, where in admission.watched.stepped.schedulers.items():
        raise error_of("scheduler-in-region")(
            f"`{label}.step()` counts on the host: every replay would set the rate of the capture",
            rule="scheduler-in-region",
            stage="warmup",
            where=where or admission.where,
            cure="Step it after the call, outside of the guarded function.",
        )
    for label, where in admission.watched.stepped.iterators.items():
        raise error_of("unrepeated-effect")(
            f"`next({label})` runs on the host: every replay would use the item of the capture",
            rule="unrepeated-effect",
            stage="warmup",
            where=where or admission.where,
            cure="Take the item before the call and pass it as an argument.",
        )


def refuse_lost_gradient(admission: Admission) -> None:
    """Without autograd at the boundary, a result that hangs on parameters would silently lose its gradient."""
    mode, outputs = admission.options.mode, admission.outputs
    if mode == "autograd" or admission.watched.backward or admission.watched.failed:
        return
    if any(isinstance(out, torch.Tensor) and out.requires_grad and out.grad_fn is not None for out in outputs):
        raise SignatureError(
            f"the result requires grad, but mode {mode!r} replays no backward",
            rule="live-autograd-output",
            stage="warmup",
            where=admission.where,
        )


def refuse_recurrence(admission: Admission, label: str) -> None:
    """A tensor that the call reads and then binds anew: a replay would read the first one for ever."""
    first = next((tensor for slot, tensor in admission.before.bindings if slot.label == label), None)
    if not isinstance(first, torch.Tensor):
        return
    address = first.untyped_storage().data_ptr()
    if any(t.untyped_storage().data_ptr() == address for t in admission.watched.reads):
        raise error_of("replaced-buffer")(
            f"the call reads `{label}` and then binds another tensor to it; a replay reads the first",
            rule="replaced-buffer",
            stage="capture",
            where=admission.where,
            cure=f"Write it in place: `{label}.copy_(...)`.",
        )


def refuse_exchange(admission: Admission, label: str, new: torch.Tensor) -> None:
    """A place that the call has hold another tensor that was there before: a replay leaves it as it is."""
    address = new.untyped_storage().data_ptr()
    there = [tensor for _, tensor in admission.after.bindings if isinstance(tensor, torch.Tensor)]
    if any(t.untyped_storage().data_ptr() == address for t in (*there, *admission.watched.reads)):
        raise error_of("replaced-buffer")(
            f"the call has `{label}` hold another tensor that exists outside of it; a replay does not",
            rule="replaced-buffer",
            stage="capture",
            where=admission.where,
            cure="Copy the values (`copy_`) where the call exchanges names, or exchange them outside.",
        )


def refuse_live_attributes(admission: Admission) -> None:
    """In mode "autograd", an attribute that the forward leaves behind with its autograd graph: a replay's has none."""
    known = {slot.label: tensor for slot, tensor in admission.before.bindings}
    for slot in admission.state.slots():
        new = slot.get()
        if isinstance(new, torch.Tensor) and new.grad_fn is not None and new is not known.get(slot.label):
            raise SignatureError(
                f"the call leaves `{slot.label}` behind, which requires grad; after a replay it would not",
                rule="live-autograd-output",
                stage="warmup",
                where=admission.where,
                cure="Return it as a further result, or store `.detach()`.",
            )


def failure_of(admission: Admission, failed: CaptureFailed) -> BaseException:
    """A failed capture as an error about the user's line; an interrupt stays what it is."""
    if not isinstance(failed.first, Exception):
        return failed.first
    watched = admission.watched
    if isinstance(failed.first, UncapturedWork):
        return _unforked(watched.streams.get(failed.first.args[0]) or admission.where)
    error = translate(failed.first, watched.events, admission.where, admission.backend.out_of_memory(failed.first))
    elsewhere = list(watched.streams.values())[1:]
    if error.rule == "host-sync" and error.where is not None and error.where in elsewhere:
        error = _unforked(error.where, failed.first)  # refused, since its stream is no part of the capture
    if not failed.healed:
        error = error_of("damaged-process")(
            f"{error.reason}; the capture could not be ended cleanly and the process is damaged",
            rule="damaged-process",
            stage=error.stage,
            where=error.where,
            cause=failed.first,
        )
    return error


def _unforked(where: Where | None, cause: BaseException | None = None) -> CaptureError:
    return error_of("unforked-stream")(
        "the call works on a stream that was not forked from the current one: a replay leaves that out",
        rule="unforked-stream",
        stage="capture",
        where=where,
        cause=cause,
        cure="Call `side.wait_stream(torch.cuda.current_stream())` before it and join the stream afterwards.",
    )
