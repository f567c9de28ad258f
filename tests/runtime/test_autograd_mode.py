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


# ---- buckets ----

SIZES = [4, 8, 16]


class Tokens(torch.nn.Module):
    """Embeds floats, mixes each position, and scales by a learned vector; padding of zeros is neutral with the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(3, 6)
        self.out = torch.nn.Linear(6, 2)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> Any:
        h = torch.tanh(self.inner(x)) * mask.unsqueeze(-1)
        return self.out(h) * mask.unsqueeze(-1), h.sum(1) / mask.sum(1, keepdim=True)


def bucketed(kit: Any, **options: Any) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    mine, twin = Tokens().to(kit.device), Tokens().to(kit.device)
    twin.load_state_dict(mine.state_dict())
    buckets = {"x": (1, SIZES), "mask": (1, SIZES)}
    return mine, twin, kit.guard(mine, mode="autograd", buckets=buckets, **options)


def tokens(kit: Any, length: int, seed: int, grad: bool = True) -> Any:
    x = kit.randn(2, length, 3, seed=seed)
    return x.requires_grad_(grad), torch.ones(2, length, device=kit.device)


def test_buckets_route_pad_and_cut_with_gradients(kit: Any) -> None:
    mine, twin, guard = bucketed(kit)
    for i, length in enumerate([5, 3, 16, 1, 8, 5, 2, 7, 16, 4, 3, 9, 9, 2, 11, 6]):
        results = []
        for run in (guard, twin):
            x, mask = tokens(kit, length, i)
            rows, mean = run(x, mask)
            (rows.square().sum() + mean.sum() * 3).backward()
            results.append((rows, mean, x.grad))
        (rows, mean, grad), (want_rows, want_mean, want_grad) = results
        assert rows.shape == want_rows.shape == (2, length, 2)
        assert grad.shape == (2, length, 3)
        torch.testing.assert_close(rows, want_rows)
        torch.testing.assert_close(mean, want_mean)
        torch.testing.assert_close(grad, want_grad)
        for p, q in zip(mine.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5)
        if i % 3 == 2:  # accumulate over three calls of three lengths
            mine.zero_grad(), twin.zero_grad()
    assert guard.stats["captures"] == len(SIZES)
    assert guard.report().proved


def test_bucketed_forwards_of_two_sizes_before_their_backwards(kit: Any) -> None:
    mine, twin, guard = bucketed(kit)
    for i in range(6):
        losses = []
        for run in (guard, twin):
            outs = [run(*tokens(kit, length, i, grad=False))[0].square().sum() for length in (3, 7, 13)]
            for loss in outs:
                loss.backward()
            losses.append([loss.item() for loss in outs])
        assert losses[0] == pytest.approx(losses[1])
    for p, q in zip(mine.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-4)


def test_padding_that_changes_a_gradient_is_found(kit: Any) -> None:
    m = torch.nn.Linear(3, 3).to(kit.device)
    guard = kit.guard(lambda x: (m(x), m(x).mean()), mode="autograd", buckets={"x": (0, [8])})
    with pytest.raises(CaptureError) as caught:
        guard(kit.randn(5, 3))
    assert caught.value.rule == "padding-changes-result"


def test_padding_that_only_poisons_the_gradient_is_found(kit: Any) -> None:
    """The result is right, but zero times infinity in the padding is no zero."""
    w = torch.nn.Parameter(torch.ones(3, device=kit.device))

    class Root(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = w

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.w).sqrt()

    guard = kit.guard(Root(), mode="autograd", buckets={"x": (0, [8])})
    with pytest.raises(CaptureError) as caught:
        guard(torch.rand(5, 3, device=kit.device) + 1)
    assert caught.value.rule == "padding-changes-result"
    fine = kit.guard(Root(), mode="autograd", buckets={"x": (0, [8])}, pad={"x": 1.0})
    for i in range(5):
        w.grad = None
        x = torch.rand(3 + i, 3, device=kit.device) + 1
        fine(x).sum().backward()
        mine, w.grad = w.grad, None
        (x * w).sqrt().sum().backward()
        torch.testing.assert_close(mine, w.grad)


def test_buckets_without_gradients(kit: Any) -> None:
    _, twin, guard = bucketed(kit)
    with torch.no_grad():
        kept = []
        for i, length in enumerate([5, 3, 16, 5, 5, 5, 3, 3, 9]):
            x, mask = tokens(kit, length, i)
            kept.append((guard(x, mask)[0], twin(x, mask)[0]))
    for mine, want in kept:
        torch.testing.assert_close(mine, want)


# ---- corners ----


def test_an_argument_changed_in_place(kit: Any) -> None:
    w = torch.nn.Parameter(torch.ones(3, device=kit.device))

    def fn(cache: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        cache.add_(x.detach())
        return (cache.detach() * w * x).sum()

    guard = kit.guard(fn, mode="autograd")
    mine, twin = torch.zeros(3, device=kit.device), torch.zeros(3, device=kit.device)
    for i in range(6):
        grads = []
        for run, cache in ((guard, mine), (fn, twin)):
            w.grad = None
            run(cache, kit.randn(3, seed=i)).backward()
            grads.append(w.grad)
        assert torch.equal(mine, twin)
        assert torch.equal(*grads)


def test_neither_arguments_nor_results_with_gradients(kit: Any) -> None:
    table = torch.arange(3.0, device=kit.device)
    guard = kit.guard(lambda: table * 2, mode="autograd")
    for _ in range(5):
        assert guard().tolist() == [0.0, 2.0, 4.0]


def test_double_backward_says_so(kit: Any) -> None:
    _, _, guard = twins(kit)
    for i in range(3):
        x = kit.randn(4, 6, seed=i).requires_grad_()
        (grad,) = torch.autograd.grad((guard(x) ** 2).mean(), x, create_graph=i == 2)
    with pytest.raises(RuntimeError):
        grad.sum().backward()


def test_a_key_function(kit: Any) -> None:
    factor = {"by": 1}
    guard = kit.guard(lambda x: x * factor["by"], mode="autograd", buckets=lambda x: factor["by"], watch="off")
    for i, by in enumerate([1, 1, 1, 2, 2, 1, 2, 1]):
        factor["by"] = by
        x = kit.randn(3, seed=i).requires_grad_()
        y = guard(x)
        y.sum().backward()
        assert torch.equal(y, x * by)
        assert x.grad.tolist() == [float(by)] * 3
    assert guard.stats["graphs"] == 2


def test_warn_goes_on_with_the_graphs(kit: Any) -> None:
    import random

    guard = kit.guard(lambda x: x * random.random(), mode="autograd", on_violation="warn")
    with pytest.warns(UserWarning, match="replay-mismatch"):
        guard(kit.randn(3).requires_grad_())
    assert guard.stats["graphs"] == 1
    assert not guard.report().proved


def test_a_counter_on_the_host_is_found(kit: Any) -> None:
    class Warm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return x / self.calls

    m = Warm()
    with pytest.raises(CaptureError, match=r"on the host `module\.calls: 0 -> 1` changes") as caught:
        kit.guard(m, mode="autograd")(kit.randn(3).requires_grad_())
    assert caught.value.rule == "frozen-scalar"
    assert m.calls == 0
