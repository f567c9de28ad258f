"""What can't be captured is named and leaves no trace; what changes under a graph is noticed."""

from __future__ import annotations

import copy
import random
import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from graphlint.runtime.errors import (  # noqa: E402
    AddressChangedError,
    CaptureError,
    DynamicShapeError,
    GeneratorError,
    HostSyncError,
    NotWorthwhile,
    OutOfGraphMemoryError,
    PoolLeakError,
    ReplayMismatchError,
    StaleScalarError,
)
from graphlint.runtime.fake import FakeBackend, FakeGraph  # noqa: E402
from graphlint.runtime.guard import capture_safe  # noqa: E402


def linear(kit: Any) -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(4, 4).to(kit.device)


def trainer(kit: Any, **options: Any) -> Any:
    m = linear(kit)
    o = torch.optim.SGD(m.parameters(), lr=0.1, **options)

    def step(x: torch.Tensor) -> torch.Tensor:
        o.zero_grad()
        loss = m(x).square().mean()
        loss.backward()
        o.step()
        return loss

    return m, o, step


# ---- failing to capture ----


@pytest.mark.parametrize(
    ("fn", "kind", "rule"),
    [
        (lambda x: x * x.sum().item(), HostSyncError, "host-sync"),
        (lambda x: x[x > 0].sum(), CaptureError, None),
        (lambda x: x.nonzero().sum(), DynamicShapeError, "dynamic-shape"),
    ],
)
def test_the_fault_is_named(kit: Any, fn: Any, kind: type, rule: str | None) -> None:
    with pytest.raises(kind) as caught:
        kit.guard(fn)(kit.randn(8))
    error = caught.value
    assert error.filename == __file__
    assert "lambda x" in error.source_line
    assert rule in (None, error.rule)
    assert error.stage == "forward"
    assert error.cause is not None
    assert error.to_dict()["row"] == error.lineno


def test_a_branch_on_data_has_its_own_rule(kit: Any) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x
        return -x

    with pytest.raises(HostSyncError) as caught:
        kit.guard(fn)(kit.randn(8))
    assert caught.value.rule == "data-dependent-branch"
    assert caught.value.source_line == "if x.sum() > 0:"


def test_a_failed_call_has_no_effect_and_later_guards_work(kit: Any) -> None:
    m, o, step = trainer(kit, momentum=0.9)
    older = kit.guard(lambda x: torch.nn.functional.dropout(x, 0.5))
    x = kit.randn(64)
    for _ in range(4):
        older(x)

    def bad(x: torch.Tensor) -> torch.Tensor:
        loss = step(x)
        return loss * loss.item()

    before = {k: v.clone() for k, v in m.state_dict().items()}
    rng = torch.get_rng_state() if kit.device == "cpu" else torch.cuda.get_rng_state()
    with pytest.raises(HostSyncError):
        kit.guard(bad)(kit.randn(2, 4))
    assert all(torch.equal(v, m.state_dict()[k]) for k, v in before.items())
    assert not o.state
    assert all(p.grad is None for p in m.parameters())
    assert torch.equal(rng, torch.get_rng_state() if kit.device == "cpu" else torch.cuda.get_rng_state())
    a, b = older(x).clone(), older(x).clone()
    assert not torch.equal(a, b)
    good = kit.guard(step)
    for i in range(5):
        good(kit.randn(2, 4, seed=i))
    assert good.stats["replays"] > 0


def test_an_invalidated_capture_is_healed(kit: Any) -> None:
    sym = torch.eye(3, device=kit.device)
    with pytest.raises(CaptureError) as caught:
        kit.guard(lambda x: torch.linalg.eigh(x + x.t())[0])(sym)
    assert caught.value.rule == "checked-linalg"
    assert torch.equal(kit.guard(lambda x: x * 2)(sym), sym * 2)
    torch.rand(3, device=kit.device)


def test_eager_only_when_asked_counted_and_told_once(kit: Any) -> None:
    def run(guarded: bool) -> Any:
        m, _o, step = trainer(kit)

        def bad(x: torch.Tensor) -> Any:
            return step(x).item()

        fn = kit.guard(bad, on_violation="eager") if guarded else bad
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            losses = [fn(kit.randn(2, 4, seed=i)) for i in range(6)]
        return losses, m.state_dict(), fn, [w for w in seen if "runs eagerly" in str(w.message)]

    eager, want, _, _ = run(False)
    losses, have, guard, told = run(True)
    assert losses == eager
    assert all(torch.equal(want[k], have[k]) for k in want)
    assert len(told) == 1
    assert told[0].filename == __file__
    assert "host-sync" in str(told[0].message)
    assert guard.stats["eager"] == 6
    assert guard.report().fallbacks[0].calls == 6


def test_eager_also_where_the_call_is_refused_beforehand(kit: Any) -> None:
    base, twin = kit.randn(6), kit.randn(6)
    fn = lambda a, b: a.mul_(2).sum() + b.sum()  # noqa: E731
    guard = kit.guard(fn, on_violation="eager")
    with pytest.warns(UserWarning, match="overlapping-input"):
        got = guard(base[:4], base[2:])
    assert torch.equal(got, fn(twin[:4], twin[2:]))
    assert torch.equal(base, twin)
    assert guard.stats["eager"] == 1
    assert guard.stats["captures"] == 0


def test_a_keyboard_interrupt_leaves_no_trace(kit: Any) -> None:
    m, _o, step = trainer(kit)
    calls = [0]

    def interrupted(x: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        if kit.backend.capturing():
            raise KeyboardInterrupt
        return step(x)

    before = {k: v.clone() for k, v in m.state_dict().items()}
    with pytest.raises(KeyboardInterrupt):
        kit.guard(interrupted, watch="off")(kit.randn(2, 4))
    assert all(torch.equal(v, m.state_dict()[k]) for k, v in before.items())
    good = kit.guard(step)
    for i in range(5):
        good(kit.randn(2, 4, seed=i))
    assert good.stats["graphs"] == 1


def test_a_rebound_buffer_that_is_read_back_is_refused(kit: Any) -> None:
    class Ema(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mean = self.mean * 0.9 + x * 0.1
            return self.mean * 2

    with pytest.raises(AddressChangedError, match="binds another tensor"):
        kit.guard(Ema().to(kit.device))(kit.randn(3))


def test_an_attribute_that_is_only_written_is_followed(kit: Any) -> None:
    class Keeps(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last = x * 2
            return x + 1

    m = Keeps()
    guard = kit.guard(m)
    for i in range(6):
        x = kit.randn(3, seed=i)
        guard(x)
        assert torch.equal(m.last, x * 2)


# ---- what only a pretended device can do ----


def test_memory_that_runs_out_during_capture() -> None:
    backend = FakeBackend()
    backend.fail = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(OutOfGraphMemoryError, match="memory ran out"):
        capture_safe(lambda x: x * 2, backend=backend)(torch.ones(2))
    assert capture_safe(lambda x: x * 2, backend=backend)(torch.ones(2)).tolist() == [2.0, 2.0]


def test_a_process_that_does_not_heal_is_called_damaged() -> None:
    backend = FakeBackend()
    backend.heals = False
    with pytest.raises(CaptureError, match="the process is damaged") as caught:
        capture_safe(lambda x: torch.linalg.eigh(x)[0], backend=backend)(torch.eye(3))
    assert caught.value.rule == "damaged-process"


def test_memory_that_grows_over_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, marks = FakeBackend(), iter([1000, 1512])
    monkeypatch.setattr(backend, "allocated", lambda device: next(marks))
    with pytest.raises(PoolLeakError, match="512 bytes more"):
        capture_safe(lambda x: x * 2, backend=backend)(torch.ones(2))


def test_a_graph_that_buys_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from graphlint.runtime import verify

    ticks = iter([0.0, 5e-4, 0.0, 6e-4])  # five eager calls, five replays
    monkeypatch.setattr(verify, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    backend = FakeBackend()
    backend.times = True
    with pytest.warns(NotWorthwhile, match="a replay takes 120 us, eager 100 us"):
        capture_safe(lambda x: x * 2, backend=backend)(torch.ones(2))


def test_a_generator_that_is_left_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FakeBackend()
    replay = FakeGraph._replay

    def frozen(self: Any) -> None:
        state = torch.get_rng_state()
        replay(self)
        torch.set_rng_state(state)

    monkeypatch.setattr(FakeGraph, "_replay", frozen)
    with pytest.raises(GeneratorError, match="the generators stand elsewhere"):
        capture_safe(lambda x: x + torch.rand(2), backend=backend)(torch.ones(2))


# ---- wrong replays ----


def test_a_host_random_number_is_found(kit: Any) -> None:
    with pytest.raises(ReplayMismatchError, match="differs"):
        kit.guard(lambda x: x * random.random())(kit.randn(3))


def test_a_host_counter_is_found_and_named(kit: Any) -> None:
    class Warm:
        def __init__(self) -> None:
            self.calls = 0

        def step(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return x / self.calls

    with pytest.raises(CaptureError, match=r"self\.calls"):
        kit.guard(Warm().step)(kit.randn(3))


def test_warn_goes_on_with_the_graph(kit: Any) -> None:
    guard = kit.guard(lambda x: x * random.random(), on_violation="warn")
    with pytest.warns(UserWarning, match="replay-mismatch"):
        guard(kit.randn(3))
    assert guard.stats["graphs"] == 1
    assert not guard.report().proved


def test_a_long_parity_run(kit: Any) -> None:
    _, _, step = trainer(kit, momentum=0.9)
    guard = kit.guard(step, verify=20)
    guard(kit.randn(2, 4))
    texts = [p.text for p in guard.report().graphs[0].proofs]
    assert any("20 step(s) equal, bitwise" in t for t in texts)


def test_a_generator_of_ones_own_is_registered(kit: Any) -> None:
    gen = torch.Generator(kit.device).manual_seed(1)
    guard = kit.guard(lambda x: x + torch.rand(3, generator=gen, device=kit.device))
    twin = torch.Generator(kit.device).manual_seed(1)
    x = torch.zeros(3, device=kit.device)
    for _ in range(6):
        assert torch.equal(guard(x), torch.rand(3, generator=twin, device=kit.device))
    gen.manual_seed(9)
    assert torch.equal(guard(x), torch.rand(3, generator=twin.manual_seed(9), device=kit.device))


def test_seeding_inside_is_refused(kit: Any) -> None:
    if kit.device == "cpu":
        pytest.skip("a CPU generator can be seeded on a tape; the CPU counterpart is the frozen host number above")
    with pytest.raises((GeneratorError, ReplayMismatchError)):  # torch 2.11 lets it through; verification does not
        kit.guard(lambda x: (torch.cuda.manual_seed(3), x + torch.rand(3, device=kit.device))[1])(kit.randn(3))


# ---- watching ----


def until_caught(run: Any, limit: int) -> int:
    """After how many calls `run` raises; fails beyond the limit."""
    for i in range(1, limit + 1):
        try:
            run()
        except (AddressChangedError, StaleScalarError):
            return i
    raise AssertionError(f"not caught within {limit} replays")


def warmed(kit: Any, fn: Any, x: Any, **options: Any) -> Any:
    guard = kit.guard(fn, **options)
    for _ in range(5):
        guard(x)
    return guard


def test_moved_parameters_are_caught(kit: Any) -> None:
    x = kit.randn(2, 4)
    for change, at_once in (
        (lambda m: m.load_state_dict({k: v.clone() for k, v in m.state_dict().items()}, assign=True), True),
        (lambda m: setattr(m.weight, "data", m.weight.data.clone()), True),
        (lambda m: m.bias.__setattr__("data", m.bias.data.clone()), False),
        (lambda m: setattr(m, "bias", torch.nn.Parameter(m.bias.detach().clone())), False),
    ):
        m = linear(kit)
        guard = warmed(kit, lambda x, m=m: m(x).detach(), x)
        limit = 1 if at_once else guard._graphs[next(iter(guard._graphs))].watch.within
        change(m)
        assert until_caught(lambda guard=guard: guard(x), limit) <= limit


def test_a_plain_load_keeps_the_graph(kit: Any) -> None:
    m = linear(kit)
    x = kit.randn(2, 4)
    guard = warmed(kit, lambda x: m(x).detach(), x)
    m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()})
    assert torch.equal(guard(x), m(x))
    assert guard.stats["captures"] == 1
    guard(x)
    assert guard.stats["captures"] == 1


def test_a_loaded_optimizer_is_caught_at_once(kit: Any) -> None:
    _, o, step = trainer(kit, momentum=0.9)
    guard = warmed(kit, step, kit.randn(2, 4))
    o.load_state_dict(o.state_dict())  # the same tensors: nothing moved
    guard(kit.randn(2, 4))
    o.load_state_dict(copy.deepcopy(o.state_dict()))
    with pytest.raises(AddressChangedError) as caught:
        guard(kit.randn(2, 4))
    assert caught.value.rule == "replaced-optimizer-state"
    guard.invalidate("checkpoint loaded")
    guard(kit.randn(2, 4))


def test_a_changed_lr_number_is_caught_at_once(kit: Any) -> None:
    _, o, step = trainer(kit)
    guard = warmed(kit, step, kit.randn(2, 4))
    o.param_groups[0]["lr"] = 0.5
    with pytest.raises(StaleScalarError) as caught:
        guard(kit.randn(2, 4))
    assert caught.value.rule == "frozen-lr"


def test_other_numbers_are_caught_in_time(kit: Any) -> None:
    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.by = 2.0
            self.inner = torch.nn.Dropout(0.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * self.by

    x = kit.randn(3)
    for change in (lambda m: setattr(m, "by", 3.0), lambda m: setattr(m.inner, "p", 0.5)):
        m = Scaled()
        guard = warmed(kit, m, x)
        promised = guard._graphs[next(iter(guard._graphs))].watch.within
        change(m)
        assert until_caught(lambda guard=guard: guard(x), promised + 1) <= promised


def test_the_mode_of_a_submodule_gets_its_own_graph_in_time(kit: Any) -> None:
    m = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)).to(kit.device)
    x = kit.randn(2, 4)
    guard = warmed(kit, lambda x: m(x).detach(), x)
    promised = guard._graphs[next(iter(guard._graphs))].watch.within
    m[1].eval()
    for _ in range(promised):
        guard(x)
    assert guard.stats["graphs"] == 2
    assert torch.equal(guard(x), m(x))


def test_a_number_of_the_function_itself_is_caught_at_once(kit: Any) -> None:
    scale = 2.0

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * scale

    guard = warmed(kit, fn, kit.randn(3))
    scale = 3.0
    with pytest.raises(StaleScalarError, match=r"`scale` was 2.0 at capture and is 3.0 now"):
        guard(kit.randn(3))


def test_full_watch_catches_everything_at_once(kit: Any) -> None:
    m = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(6)]).to(kit.device)
    x = kit.randn(2, 4)
    guard = warmed(kit, lambda x: m(x).detach(), x, watch="full")
    m[4].bias.data = m[4].bias.data.clone()
    with pytest.raises(AddressChangedError, match=r"4\.bias"):
        guard(x)


def test_recapture_and_eager_on_a_broken_fact(kit: Any) -> None:
    for choice in ("recapture", "eager"):
        m = linear(kit)
        x = kit.randn(2, 4)
        guard = warmed(kit, lambda x, m=m: m(x).detach(), x, on_violation=choice)
        m.weight.data = m.weight.data * 2
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(5):
                assert torch.equal(guard(x), m(x))
        assert guard.stats["captures"] == (2 if choice == "recapture" else 1)


def test_watch_off_looks_at_nothing(kit: Any) -> None:
    _, o, step = trainer(kit)
    guard = warmed(kit, step, kit.randn(2, 4), watch="off")
    o.param_groups[0]["lr"] = 0.5
    guard(kit.randn(2, 4))
    assert "nothing is watched" in str(guard.report())
