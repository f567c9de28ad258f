"""Builds timelines by hand: one host thread that launches, one device that works."""

from __future__ import annotations

from dataclasses import dataclass, field

from graphlint.runtime.profiling.timeline import (
    MODULE_MARK,
    STEP_MARK,
    CallKind,
    DeviceOp,
    HostCall,
    HostRange,
    RangeKind,
    Timeline,
)

HOST, AUTOGRAD = 1, 2


@dataclass
class Recorder:
    """Plays host and device: `launch` costs the host time, the device works when it is free."""

    host: float = 0.0
    device: float = 0.0
    thread: int = HOST
    calls: list[HostCall] = field(default_factory=list)
    ranges: list[HostRange] = field(default_factory=list)
    ops: list[DeviceOp] = field(default_factory=list)

    def launch(
        self, device: float, host: float = 10.0, name: str = "kernel", grid: tuple[int, ...] = (1, 1, 1)
    ) -> None:
        """`host` microseconds of Python, 1 of them in the call, then `device` microseconds of work."""
        number = len(self.calls)
        begin = self.host + host - 1
        self.host += host
        self.calls.append(HostCall("cudaLaunchKernel", begin, self.host, self.thread, CallKind.LAUNCH, number))
        start = max(self.host + 2, self.device + 1)
        self.device = start + device
        self.ops.append(DeviceOp(name, start, self.device, 7, "kernel", number, grid))

    def wait(self, name: str = "cudaStreamSynchronize") -> None:
        begin, self.host = self.host, max(self.host, self.device)
        self.calls.append(HostCall(name, begin, self.host, self.thread, CallKind.WAIT, len(self.calls)))

    def idle(self, host: float) -> None:
        self.host += host

    def mark(self, name: str, start: float, kind: RangeKind, **more: object) -> None:
        self.ranges.append(HostRange(name, start, self.host, self.thread, kind, **more))  # type: ignore[arg-type]

    def module(self, path: str, cls: str, start: float) -> None:
        self.mark(f"{MODULE_MARK}{path}|{cls}", start, RangeKind.MODULE)

    def step(self, number: int, start: float) -> None:
        self.thread = HOST
        self.mark(f"{STEP_MARK}{number}", start, RangeKind.STEP)

    def timeline(self) -> Timeline:
        return Timeline(
            source="by hand",
            calls=tuple(sorted(self.calls, key=lambda c: c.start)),
            ranges=tuple(sorted(self.ranges, key=lambda r: (r.start, -r.end))),
            device=tuple(sorted(self.ops, key=lambda o: (o.start, o.end))),
        )


def steady(kernels: int, device: float, host: float, steps: int = 4) -> Timeline:
    """Equal steps of equal kernels."""
    recorder = Recorder()
    for number in range(steps):
        start = recorder.host
        for _ in range(kernels):
            recorder.launch(device, host)
        recorder.step(number, start)
    return recorder.timeline()
