"""Mode "autograd": gradients equal eager, over micro-batches too, and live in memory of their own."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from graphlint.runtime.errors import CaptureError, TwoForwardsError  # noqa: E402


def twins(kit: Any, **options: Any) -> tuple[Any, Any, Any]:
    """A module, an equal one, and a guard around the first."""
    torch.manual_seed(0)
    made = [
        torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2)).to(kit.device)
        for _ in range(2)
    ]
    made[1].load_state_dict(made[0].state_dict())
    return made[0], made[1], kit.guard(made[0], mode="autograd", **options)


def assert_same_grads(a: Any, b: Any) -> None:
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            assert torch.equal(p.grad, q.grad), name


def test_gradients_over_micro_batches_equal_eager(kit: Any) -> None:
    mine, twin, guard = twins(kit)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (mine, twin)]
    for step in range(5):
        for micro in range(4):
            x = kit.randn(4, 6, seed=10 * step + micro)
            for run in (guard, twin):
                (run(x) ** 2).mean().backward()
        assert_same_grads(mine, twin)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
    for (k, a), b in zip(mine.state_dict().items(), twin.state_dict().values(), strict=True):
        assert torch.equal(a, b), k
    assert guard.stats["captures"] == 1


def test_input_gradients_and_several_outputs(kit: Any) -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        return {"a": x * y, "b": [x.sum(), 3], "c": y.detach() * 2}

    guard = kit.guard(fn, mode="autograd")
    for i in range(5):
        got = [kit.randn(3, seed=i).requires_grad_(), kit.randn(3, seed=100 + i)]
        want = [t.detach().clone().requires_grad_(t.requires_grad) for t in got]
        for run, args in ((guard, got), (fn, want)):
            out = run(*args)
            (out["a"].sum() * 2 + out["b"][0]).backward()
        assert torch.equal(got[0].grad, want[0].grad)
        assert got[1].grad is None


def test_gradients_do_not_alias_the_graph(kit: Any) -> None:
    mine, _, guard = twins(kit)
    kept = []
    for i in range(4):
        (guard(kit.randn(4, 6, seed=i)) ** 2).mean().backward()
        kept.append([p.grad for p in mine.parameters()])
        copies = [[g.clone() for g in grads] for grads in kept]
        for p in mine.parameters():
            p.grad = None
        (guard(kit.randn(4, 6, seed=50 + i)) ** 2).mean().backward()
        for grads, old in zip(kept, copies, strict=True):
            for g, o in zip(grads, old, strict=True):
                assert torch.equal(g, o)
        for p in mine.parameters():
            p.grad = None


def test_autograd_grad_leaves_parameters_alone(kit: Any) -> None:
    mine, twin, guard = twins(kit)
    for i in range(3):
        x, y = kit.randn(4, 6, seed=i).requires_grad_(), kit.randn(4, 6, seed=i).requires_grad_()
        (a,) = torch.autograd.grad((guard(x) ** 2).mean(), x)
        (b,) = torch.autograd.grad((twin(y) ** 2).mean(), y)
        assert torch.equal(a, b)
        assert all(p.grad is None for p in mine.parameters())


def test_two_forwards_before_a_backward_are_refused(kit: Any) -> None:
    _, _, guard = twins(kit)
    (guard(kit.randn(4, 6)) ** 2).mean().backward()
    first, second = guard(kit.randn(4, 6, seed=1)), guard(kit.randn(4, 6, seed=2))
    with pytest.raises(TwoForwardsError, match="another forward ran"):
        first.sum().backward()
    second.sum().backward()
    again = guard(kit.randn(4, 6, seed=3))
    again.sum().backward(retain_graph=True)
    with pytest.raises(TwoForwardsError, match="has run already"):
        again.sum().backward()


def test_without_grad_only_the_forward_is_captured(kit: Any) -> None:
    _, twin, guard = twins(kit)
    twin.eval(), guard.eval()
    with torch.no_grad():
        for i in range(4):
            x = kit.randn(4, 6, seed=i)
            assert torch.equal(guard(x), twin(x))


def test_parameter_hooks_run(kit: Any) -> None:
    mine, twin, guard = twins(kit)
    seen: list[int] = []
    for m in (mine, twin):
        m[0].weight.register_hook(lambda g: (seen.append(1), g * 2)[1])
    for i in range(4):
        x = kit.randn(4, 6, seed=i)
        for run in (guard, twin):
            (run(x) ** 2).mean().backward()
    assert_same_grads(mine, twin)
    assert len(seen) >= 8


def test_dropout_trajectory_equals_eager(kit: Any) -> None:
    layer = torch.nn.Dropout(0.5)

    def run(guarded: bool) -> list[Any]:
        fn = kit.guard(layer, mode="autograd") if guarded else layer
        kit.seed(5)
        out = []
        for i in range(6):
            x = kit.randn(32, seed=i).requires_grad_()
            fn(x).sum().backward()
            out.append(x.grad)
        return out

    for a, b in zip(run(True), run(False), strict=True):
        assert torch.equal(a, b)


def test_a_fault_in_backward_names_the_forward_line(kit: Any) -> None:
    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            return g * g.sum().item()  # the fault

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        return Bad.apply(y)

    guard = kit.guard(fn, mode="autograd")
    with pytest.raises(CaptureError) as caught:
        guard(kit.randn(3).requires_grad_())
    assert caught.value.rule == "host-sync"
    assert "the fault" in caught.value.source_line
