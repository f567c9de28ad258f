"""Judges what the dry run wrote down: which operators and events break a capture, under which rule, in which words.
Plain Python, no torch.

The operators come from the `[ops]` tables of the rulebook. An operator there is a suspect; a condition below may
clear it, because only a CPU does it, or because it is harmful in one form alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from graphlint import rulebook
from graphlint.findings import Finding, Place, Related, Step
from graphlint.runtime.dryrun.records import Event, Op, Site, Trace

Version = tuple[int, int]


class EventFact(msgspec.Struct, frozen=True):
    """What an event means: its rule, the reason, and the torch releases that it holds for."""

    rule: str
    why: str
    until: str = ""


EVENTS: dict[str, EventFact] = {
    "read": EventFact("host-sync", "waits for the GPU and brings its values to the host"),
    "d2h": EventFact("host-sync", "copies a device tensor to pageable host memory and waits for it"),
    "h2d": EventFact("host-copy", "copies {detail} host memory to the device"),
    "cond": EventFact("cond-operator", "reads its predicate on the host before torch 2.12", until="2.11"),
    "one-hot": EventFact("dynamic-shape", "reads the largest class on the host to size its result"),
    "print": EventFact("printed-tensor", "reads the tensor's values on the host to write them out"),
    "host-index": EventFact("host-index", "copies the {detail} from the host to the device"),
    "pinned-alloc": EventFact(
        "pinned-alloc", "allocates pinned memory, which is not permitted while a stream captures", until="2.10"
    ),
    "host-draw": EventFact(
        "host-rng", "draws a random number on the host; the graph keeps the one of the capture for good"
    ),
    "seed": EventFact("seed-in-region", "seeds a generator inside the region"),
    "rng-state": EventFact("generator-state", "{detail}s the state of a generator on the host", until="2.9"),
    "generator-born": EventFact(
        "generator-state", "makes a generator inside the region, whose state lives on the host"
    ),
    "custom-generator": EventFact(
        "unregistered-generator", "draws from a generator that the graph does not know", until="2.12"
    ),
    "stream-sync": EventFact(
        "stream-sync", "asks the host to wait for the device, which a capturing stream does not allow"
    ),
    "unforked-stream": EventFact(
        "unforked-stream", "gives work to a stream that has not been forked from the capturing one"
    ),
    "unjoined-stream": EventFact(
        "unjoined-stream", "leaves work on a side stream that the capturing stream never waits for"
    ),
    "default-stream": EventFact("default-stream", "gives work to the default stream, which can't be captured"),
    "outside-event": EventFact("outside-event", "waits for an event that was recorded outside the capture"),
    "nested-capture": EventFact("nested-capture", "opens a capture inside a capture"),
    "thread": EventFact(
        "thread-in-capture", "uses the device on another thread{detail} while the region is open in global mode"
    ),
    "first-compiled-call": EventFact(
        "first-compiled-call", "is called for the first time inside the region, so it compiles there"
    ),
    "scheduler-step": EventFact(
        "scheduler-in-region", "runs on the host at capture only; replay keeps the learning rate"
    ),
    "not-capturable": EventFact("not-capturable", "refuses to step in a capture: its `capturable` is False"),
    "no-warmup": EventFact("no-warmup", "runs for the first time inside the region, so {detail} sets itself up there"),
    "default-stream-warmup": EventFact(
        "default-stream-warmup",
        "uses gradient nodes that were made on the default stream during warm-up and are still alive",
    ),
    "short-warmup": EventFact(
        "short-warmup", "captures a DistributedDataParallel step after {detail} warm-up steps; it needs 11"
    ),
    "graphed-hooks": EventFact("graphed-hooks", "is given a module with hooks, which it refuses"),
    "closed-over-parameters": EventFact(
        "closed-over-parameters", "is given a function that closes over parameters, whose gradients get lost"
    ),
    "two-forwards": EventFact(
        "two-forwards", "runs forward again before the backward of its last result, whose activations it overwrites"
    ),
    "graphed-grads": EventFact("graphed-grad-accumulation", "adds to gradients that are the graph's own memory"),
    "overwritten-output": EventFact(
        "overwritten-output", "overwrites the output of an earlier call, which is read afterwards ({detail})"
    ),
    "mutated-argument": EventFact(
        "skipped-cudagraph", "writes an argument of a compiled function in place, so torch skips its graph"
    ),
    "dynamic-recording": EventFact(
        "dynamic-recording", "has been given {detail} different sizes or weights, and records a graph for each"
    ),
    "recorded-stream": EventFact(
        "recorded-stream", "keeps each of these blocks out of use until the capture ends; there are several"
    ),
    "first-collective": EventFact(
        "first-collective", "is the first collective of this process group, which sets up its communicator"
    ),
    "blocking-collective": EventFact("blocking-collective", "makes the host wait for other ranks"),
    "cpu-collective": EventFact("cpu-collective", "runs over a backend that works on the host"),
}

_FILLS = (("masked_fill", "Tensor"), ("index_fill", "int_Tensor"))

#: operators that are harmful in one form alone, which a page can't say: the conditions below tell the form
FORMS: dict[str, tuple[str, str]] = {
    "aten::index": ("dynamic-shape", "selects by a mask, so the host must read how many elements are true"),
    "aten::index_put_": ("dynamic-shape", "writes through a mask, so the host must read how many elements are true"),
    "aten::_index_put_impl_": (
        "dynamic-shape",
        "writes through a mask, so the host must read how many elements are true",
    ),
    "aten::histc": ("dynamic-shape", "reads the smallest and the largest value on the host"),
    "aten::repeat_interleave": ("dynamic-shape", "reads the sum of the repeats on the host to size its result"),
    **dict.fromkeys(
        (f"aten::{name}{inplace}.{overload}" for name, overload in _FILLS for inplace in ("", "_")),
        ("host-sync", "reads the fill value on the host"),
    ),
    **dict.fromkeys(
        (f"aten::{name}.Tensor_{end}" for name in ("linspace", "logspace") for end in ("Tensor", "Scalar")),
        ("host-sync", "reads its ends on the host"),
    ),
    "aten::linspace.Scalar_Tensor": ("host-sync", "reads its ends on the host"),
    "aten::logspace.Scalar_Tensor": ("host-sync", "reads its ends on the host"),
    "aten::segment_reduce": ("hidden-check", "checks the lengths on the host"),
    "aten::_nested_tensor_from_mask": ("hidden-check", "reads the lengths on the host to pack the padding away"),
    "aten::_nested_tensor_from_mask_left_aligned": (
        "hidden-check",
        "reads on the host whether the padding is at the end",
    ),
}

#: calls inside which a CPU reads values that a device does not
_CPU_READS = (
    "one_hot",
    "quantile",
    "nanquantile",
    "cross_entropy",
    "nll_loss",
    "embedding_bag",
    "bucketize",
    "grid_sample",
    "multi_margin_loss",
)


def _masks(op: Op) -> bool:
    """Whether one of the indices is a mask on the device."""
    return any(x.dtype in ("torch.bool", "torch.uint8") and x.role == "device" for x in op.operands[1:])


def _masked_put(op: Op) -> bool:
    """A masked write of a plain number is a masked fill; of a device tensor it is not."""
    return _masks(op) and op.operands[-1].role == "device"


def _filled_from_device(op: Op) -> bool:
    """A fill value that lives on the device is read; a number of the host is not."""
    return op.operands[-1].role == "device"


def _scalar(op: Op, name: str) -> object:
    return dict(op.scalars).get(name)


def _reads(op: Op) -> bool:
    return not any(op.call.rsplit(".", 1)[-1] == name for name in _CPU_READS)


def _open_histogram(op: Op) -> bool:
    low, high = _scalar(op, "min") or 0, _scalar(op, "max") or 0
    return low == high


_CONDITIONS: dict[str, Callable[[Op], bool]] = {
    "aten::index": _masks,
    "aten::index_put_": _masked_put,
    "aten::index_put": _masked_put,
    "aten::_index_put_impl_": _masked_put,
    "aten::repeat_interleave": lambda op: not any(x == "output_size" and y is not None for x, y in op.scalars),
    "aten::histc": _open_histogram,
    **{f"aten::{name}{inplace}": _filled_from_device for name, _ in _FILLS for inplace in ("", "_")},
    "aten::normal": lambda op: op.overload in ("Tensor_Tensor", "float_Tensor"),
}


class Judge:
    """Turns traces into findings for one torch release, `(2, 11)`."""

    def __init__(self, version: Version, book: rulebook.Rulebook | None = None) -> None:
        self._version = version
        self._book = book or rulebook.load()

    def judge(self, trace: Trace) -> list[Finding]:
        """All findings of one trace, each line and rule once, in the order they were met."""
        found: dict[tuple[str, str, int], Finding] = {}
        busy = {
            event.site.place for event in trace.events if event.kind in ("not-capturable", "print", "h2d", "one-hot")
        }
        for finding in self._events(trace.events):
            found.setdefault((finding.code, finding.at.filename, finding.at.row), finding)
        for op in trace.ops:
            judged = self.operator(op)
            if judged is None or (
                op.site.place in busy and judged.name in ("host-sync", "uncapturable-optimizer", "not-capturable")
            ):
                continue
            found.setdefault((judged.code, judged.at.filename, judged.at.row), judged)
        return list(found.values())

    def _events(self, events: Iterable[Event]) -> Iterable[Finding]:
        for event in events:
            fact = EVENTS.get(event.kind)
            if fact is None or (fact.until and self._version > rulebook.parse_version(fact.until)):
                continue
            rule = fact.rule
            if event.kind in ("read", "d2h"):
                rule = self._reader(event.call, event.site, rule)
            if rule:
                yield self.finding(rule, event.call, fact.why.format(detail=event.detail), event.site, event.forward)

    def operator(self, op: Op) -> Finding | None:
        """The finding about one operator, or None where it is harmless."""
        mixed = self._mixed(op)
        if mixed is not None:
            return mixed
        suspect = self._suspect(op)
        if suspect is None or not op.on_device:
            return None
        condition = _CONDITIONS.get(op.name)
        if condition is not None and not condition(op):
            return None
        rule, why = suspect
        if rule == "host-sync":
            if not _reads(op):
                return None
            rule = self._reader(op.call, op.site, rule)
        return self.finding(rule, op.call or op.name, why, op.site, op.forward) if rule else None

    def _suspect(self, op: Op) -> tuple[str, str] | None:
        fact = self._book.ops.get(f"{op.name}.{op.overload}") or self._book.ops.get(op.name)
        if fact is not None:
            return fact.rule, fact.why
        form = FORMS.get(f"{op.name}.{op.overload}") or FORMS.get(op.name)
        if form is not None:
            return form
        if "cudagraph_unsafe" in op.tags:
            return "host-sync", "is marked `cudagraph_unsafe` by whoever registered it"
        if "dynamic_output_shape" in op.tags and op.name not in ("aten::index", "aten::repeat_interleave"):
            return "dynamic-shape", "sizes its result from data, which the host must read first"
        return None

    def _mixed(self, op: Op) -> Finding | None:
        """Operands on both sides of the border: an index or a written value that must first be brought to the
        device."""
        if op.name not in ("aten::index", "aten::index_put_", "aten::_index_put_impl_") or not op.operands:
            return None
        target, *others = op.operands
        if target.role in ("host", "pinned") and any(x.role == "device" for x in others):
            return self.finding(
                "scalar-index",
                op.call or op.name,
                "looks a device index up in a table on the host",
                op.site,
                op.forward,
            )
        strays = [x for x in others if x.role in ("host", "pinned") and x.ndim > 0]
        if op.name != "aten::index" and strays and strays[-1] is op.operands[-1] and op.operands[-1].ndim == 0:
            strays = strays[:-1]
        if target.role == "device" and strays:
            return self.finding(
                "host-index", op.call or op.name, EVENTS["host-index"].why.format(detail="index"), op.site, op.forward
            )
        return None

    def _reader(self, call: str, site: Site, rule: str) -> str:
        """Who reads a value: the same read is a branch, a loop, an index, a check or an optimizer's."""
        inside = site.inside
        for part, name in _INSIDE:
            if any(part in frame for frame in inside):
                return name
        name = call.rsplit(".", 1)[-1]
        if name in ("__repr__", "__format__", "__str__") or any("_tensor_str" in frame for frame in inside):
            return "printed-tensor"
        if name in ("gaussian_nll_loss", "corrcoef", "cov", "isclose", "pack_padded_sequence") or name.endswith(
            "TransformerEncoder"
        ):
            return "hidden-check"
        if name == "__getitem__" or name == "__setitem__" or name in ("select", "narrow"):
            return "scalar-index"
        if name == "__index__":
            return {"range": "data-dependent-loop", "index": "scalar-index", "slice": "scalar-index"}.get(
                site.branch, "scalar-index"
            )
        if name in ("__bool__", "is_nonzero"):
            return {
                "if": "data-dependent-branch",
                "assert": "data-dependent-branch",
                "while": "data-dependent-loop",
            }.get(site.branch, rule)
        return rule

    def finding(
        self, rule: str, call: str, why: str, site: Site, forward: Site | None = None, related: Iterable[Related] = ()
    ) -> Finding:
        """A finding with the rule's own code, severity and help."""
        page = self._book.get(rule)
        notes = list(related)
        if forward is not None:
            notes.append(Related(forward.filename, forward.row, "in the backward pass of this line"))
        words = f"`{_spoken(call)}` {why}"
        if site.inside and not forward:
            words += f" (in {site.inside[-1]})"
        return Finding(
            code=page.code if page else "CG000",
            name=rule,
            family=page.family if page else "",
            severity=page.severity if page else "crash",
            message=words,
            help=page.help if page else "",
            at=Place(site.filename, site.row, site.column, site.end_row or site.row, site.end_column),
            trace=tuple(Step(*step) for step in site.trace),
            related=tuple(notes),
        )


_INSIDE = (
    ("logging/__init__.py", "printed-tensor"),
    ("torch/amp/grad_scaler.py", "unfused-scaler"),
    ("torch/optim/", "uncapturable-optimizer"),
    ("torch/distributions/", "hidden-check"),
    ("torch/nn/modules/batchnorm.py", "hidden-check"),
    ("torch/nn/modules/transformer.py", "hidden-check"),
    ("torch/nn/utils/rnn.py", "hidden-check"),
)

_SPOKEN = {
    "torch.Tensor.__bool__": "bool(tensor)",
    "torch.Tensor.__index__": "tensor.__index__()",
    "torch.Tensor.__float__": "float(tensor)",
    "torch.Tensor.__int__": "int(tensor)",
    "torch.Tensor.__repr__": "repr(tensor)",
    "torch.Tensor.__format__": "format(tensor)",
    "torch.Tensor.__contains__": "value in tensor",
    "torch.Tensor.__getitem__": "tensor[...]",
    "torch.Tensor.__setitem__": "tensor[...] = value",
}


def _spoken(call: str) -> str:
    """A call as a user would say it."""
    if call in _SPOKEN:
        return _SPOKEN[call]
    return call.replace("torch.Tensor.", "Tensor.").replace("torch._VariableFunctionsClass.", "torch.")
