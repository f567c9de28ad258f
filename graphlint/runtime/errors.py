"""What the runtime half raises: one small hierarchy, every member with rule, place, stage, cause and cure.

    CaptureError                 the base: catch this one
    |- HostSyncError             a value was read on the host              (host-sync, data-control-flow)
    |- DynamicShapeError         a shape was taken from data               (dynamic-shape)
    |- HostCopyError             the region copied pageable host memory, or allocated where it may not   (dynamic-alloc)
    |- GeneratorError            random numbers the graph cannot repeat    (rng)
    |- StreamError               work or waiting on a stream outside the capture
    |  |- UnjoinedStreamError    a forked stream was not joined
    |  `- CrossThreadError       another thread disturbed the capture
    |- WarmupError               something ran for the first time inside the capture
    |- OptimizerNotCapturableError
    |- CollectiveError
    |- ReplayError               the graph stands, but this replay would be wrong
    |  |- StaleScalarError       a host value that the graph froze has changed
    |  |- AddressChangedError    a tensor that the graph reads has moved
    |  |- SignatureError         arguments that no graph can take
    |  |- OutOfBucketError       longer than the largest bucket
    |  `- TwoForwardsError       the activations of this backward are overwritten
    |- ReplayMismatchError       verification saw replay differ from eager
    |- PoolLeakError             memory grew over replays
    |- OutOfGraphMemoryError     the pool did not fit
    `- NoDeviceError             nothing here can be captured

`code` and `rule` are the linter's: a finding, a dry run and an error about the same fault carry the same words.
"""

from __future__ import annotations

import linecache
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Where:
    """A line of the user's code: `filename`, `lineno` from 1, the `function` it stands in."""

    filename: str
    lineno: int
    function: str = ""

    @property
    def source_line(self) -> str:
        """The text of that line without indentation; empty when the file can't be read."""
        return linecache.getline(self.filename, self.lineno).strip()

    def __str__(self) -> str:
        return f"{self.filename}:{self.lineno}"


MOST_OTHERS = 5  # of the other faults of a call, in the text of an error


class CaptureError(RuntimeError):
    """A call could not be captured, or a replay would not be what eager does.

    Attributes:
        code: the rule's code, `"CG101"`.
        rule: the rule's name, `"host-sync"`; its page is `rules/<rule>.md`.
        reason: one sentence, what happened.
        cure: one sentence, what to write instead.
        stage: `"preflight"`, `"warmup"`, `"forward"`, `"backward"`, `"optimizer"`, `"capture"`, `"verify"`, `"replay"`.
        where: the user's line, or None when no line of the user's is to blame.
        forward: for a fault in backward, the line of the forward call it belongs to; else None.
        cause: the first exception that CUDA or torch raised, or None.
        others: what else in the call would break its capture, a line each; known after the dry run of a failed call.
    """

    rule = "unknown-capture-failure"

    def __init__(
        self,
        reason: str,
        *,
        rule: str | None = None,
        cure: str = "",
        stage: str = "",
        where: Where | None = None,
        forward: Where | None = None,
        cause: BaseException | None = None,
    ) -> None:
        self.rule = rule or type(self).rule
        self.code, page_help = rule_words(self.rule)
        self.reason = reason
        self.cure = cure or page_help
        self.stage = stage
        self.where = where
        self.forward = forward
        self.cause = cause
        self.others: tuple[str, ...] = ()
        super().__init__(self._text())

    @property
    def filename(self) -> str:
        """File of the user's line; empty when there is none."""
        return self.where.filename if self.where else ""

    @property
    def lineno(self) -> int:
        """Row of the user's line, from 1; 0 when there is none."""
        return self.where.lineno if self.where else 0

    @property
    def source_line(self) -> str:
        """Text of the user's line; empty when there is none."""
        return self.where.source_line if self.where else ""

    def beside(self, others: Sequence[str]) -> CaptureError:
        """The same error, which also tells what else would have failed."""
        self.others = tuple(others)
        self.args = (self._text(),)
        return self

    def without_frames(self) -> CaptureError:
        """The error without tracebacks, which would keep every tensor of the failed call alive; to be stored."""
        seen: set[int] = set()
        errors: list[BaseException | None] = [self]
        while errors:
            error = errors.pop()
            if error is not None and id(error) not in seen:
                seen.add(id(error))
                error.__traceback__ = None
                errors += [error.__cause__, error.__context__, getattr(error, "cause", None)]
        return self

    def _text(self) -> str:
        lines = [f"{self.code} {self.rule}: {self.reason}" + (f" [{self.stage}]" if self.stage else "")]
        if self.where:
            lines.append(f"  --> {self.where}  {self.where.source_line}".rstrip())
        if self.forward:
            lines.append(f"  backward of {self.forward}  {self.forward.source_line}".rstrip())
        if self.cure:
            lines.append(f"  help: {self.cure}")
        if self.cause is not None:
            first = str(self.cause).strip().splitlines()
            lines.append(f"  first error: {type(self.cause).__name__}: {first[0] if first else ''}".rstrip())
        lines += [f"  also: {other}" for other in self.others[:MOST_OTHERS]]
        if len(self.others) > MOST_OTHERS:
            lines.append(f"  and {len(self.others) - MOST_OTHERS} more")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, object]:
        """The error as plain data, with the keys of the linter's JSON where both have them."""
        return {
            "code": self.code,
            "name": self.rule,
            "message": self.reason,
            "help": self.cure,
            "stage": self.stage,
            "filename": self.filename,
            "row": self.lineno,
            "source": self.source_line,
            "forward": str(self.forward) if self.forward else None,
            "others": list(self.others),
            "cause": f"{type(self.cause).__name__}: {self.cause}" if self.cause is not None else None,
        }


class HostSyncError(CaptureError):
    """A value on the device was read by the host inside the region."""

    rule = "host-sync"


class DynamicShapeError(CaptureError):
    """The shape of a tensor in the region depends on data."""

    rule = "dynamic-shape"


class HostCopyError(CaptureError):
    """The region copies pageable host memory to the device or allocates memory that a graph may not."""

    rule = "host-copy"


class GeneratorError(CaptureError):
    """The region draws from, seeds or reads a generator in a way that a graph can't repeat."""

    rule = "unregistered-generator"


class StreamError(CaptureError):
    """The region touches a stream or an event that is not part of the capture."""

    rule = "stream-sync"


class UnjoinedStreamError(StreamError):
    """A stream forked inside the region was not joined before its end."""

    rule = "unjoined-stream"


class CrossThreadError(StreamError):
    """Another thread made a call that invalidated the capture."""

    rule = "thread-in-capture"


class WarmupError(CaptureError):
    """A library, kernel or state was set up for the first time inside the capture."""

    rule = "no-warmup"


class OptimizerNotCapturableError(CaptureError):
    """The optimizer (or the scaler around it) reads device values on the host in `step()`."""

    rule = "not-capturable"


class CollectiveError(CaptureError):
    """A collective that can't be captured as written."""

    rule = "blocking-collective"


class ReplayError(CaptureError):
    """The graph is sound, but replaying it now would not do what an eager call does."""

    rule = "replay-mismatch"


class StaleScalarError(ReplayError):
    """A Python value that was frozen into the graph has changed since."""

    rule = "frozen-scalar"


class AddressChangedError(ReplayError):
    """A parameter, buffer, gradient or optimizer state now lives at another address than the graph reads."""

    rule = "replaced-parameter"


class SignatureError(ReplayError):
    """An argument that can't be part of a captured call."""

    rule = "unsupported-argument"


class OutOfBucketError(ReplayError):
    """The call is longer than the largest declared bucket."""

    rule = "out-of-bucket"


class TwoForwardsError(ReplayError):
    """The activations that this backward needs were overwritten by a later replay, or used up."""

    rule = "two-forwards"


class ReplayMismatchError(CaptureError):
    """Verification found a replay that differs from the eager call by more than eager differs from itself."""

    rule = "replay-mismatch"


class PoolLeakError(CaptureError):
    """Device memory grew while the same graph was replayed."""

    rule = "pool-growth"


class OutOfGraphMemoryError(CaptureError):
    """The graph's memory pool did not fit on the device."""

    rule = "graph-out-of-memory"


class NoDeviceError(CaptureError):
    """There is no device, or no tensor on it, that this call could be captured on."""

    rule = "no-device"


class GuardWarning(UserWarning):
    """The guard went on, but not as asked: the text says what and why."""


class FallbackWarning(GuardWarning):
    """Calls run eagerly because `on_violation="eager"` asked for it; the text says why."""


class NotWorthwhile(GuardWarning):
    """The measured replay is hardly faster than eager."""


# rule -> class, for the translator; a rule that is not listed raises plain CaptureError
ERROR_OF_RULE: dict[str, type[CaptureError]] = {
    "host-sync": HostSyncError,
    "checked-linalg": HostSyncError,
    "scalar-index": HostSyncError,
    "printed-tensor": HostSyncError,
    "hidden-check": HostSyncError,
    "data-dependent-branch": HostSyncError,
    "data-dependent-loop": HostSyncError,
    "cond-operator": HostSyncError,
    "varlen-host-length": HostSyncError,
    "host-unpad": HostSyncError,
    "dynamic-shape": DynamicShapeError,
    "host-copy": HostCopyError,
    "host-index": HostCopyError,
    "pinned-alloc": HostCopyError,
    "allocator-call": HostCopyError,
    "unregistered-generator": GeneratorError,
    "generator-state": GeneratorError,
    "seed-in-region": GeneratorError,
    "host-rng": GeneratorError,
    "frozen-rng": GeneratorError,
    "stream-sync": StreamError,
    "unforked-stream": StreamError,
    "default-stream": StreamError,
    "outside-event": StreamError,
    "nested-capture": StreamError,
    "missing-work": StreamError,
    "unjoined-stream": UnjoinedStreamError,
    "thread-in-capture": CrossThreadError,
    "no-warmup": WarmupError,
    "default-stream-warmup": WarmupError,
    "short-warmup": WarmupError,
    "first-compiled-call": WarmupError,
    "not-capturable": OptimizerNotCapturableError,
    "unfused-scaler": OptimizerNotCapturableError,
    "uncapturable-optimizer": OptimizerNotCapturableError,
    "blocking-collective": CollectiveError,
    "first-collective": CollectiveError,
    "cpu-collective": CollectiveError,
    "pipeline-transfer": CollectiveError,
    "frozen-scalar": StaleScalarError,
    "frozen-flag": StaleScalarError,
    "frozen-mode": StaleScalarError,
    "python-hook": StaleScalarError,
    "frozen-lr": StaleScalarError,
    "scheduler-in-region": StaleScalarError,
    "unrepeated-effect": StaleScalarError,
    "replaced-parameter": AddressChangedError,
    "replaced-buffer": AddressChangedError,
    "replaced-gradient": AddressChangedError,
    "replaced-optimizer-state": AddressChangedError,
    "moved-tensor": AddressChangedError,
    "unsupported-argument": SignatureError,
    "cpu-scalar-tensor": SignatureError,
    "two-devices": SignatureError,
    "overlapping-input": SignatureError,
    "live-autograd-output": SignatureError,
    "out-of-bucket": OutOfBucketError,
    "padding-changes-result": ReplayMismatchError,
    "replay-mismatch": ReplayMismatchError,
    "two-forwards": TwoForwardsError,
    "pool-growth": PoolLeakError,
    "graph-out-of-memory": OutOfGraphMemoryError,
    "no-device": NoDeviceError,
}


def error_of(rule: str) -> type[CaptureError]:
    """The class that stands for a rule: `error_of("dynamic-shape")` is DynamicShapeError; CaptureError for most."""
    return ERROR_OF_RULE.get(rule, CaptureError)


def rule_words(rule: str) -> tuple[str, str]:
    """A rule's code and one-sentence cure from the rulebook; `("CG", "")` where the rulebook has no such page.

    An error must never fail for want of a page, so a broken rulebook is as good as none here.
    """
    try:
        from graphlint import rulebook

        page = rulebook.load().get(rule)
    except Exception:
        page = None
    return (page.code, page.help) if page else ("CG", "")
