"""What optimizers do around replays: gradients that a step has used up and nothing zeroes, rates that several groups
share."""

from __future__ import annotations

from typing import Any

import torch

from graphlint.findings import Related
from graphlint.runtime.dryrun import hoststate
from graphlint.runtime.dryrun.captured import Captured
from graphlint.runtime.dryrun.judge import Judge
from graphlint.runtime.dryrun.records import Op, Site
from graphlint.runtime.dryrun.reference import Keep
from graphlint.runtime.dryrun.session import Region, Session


class Stepping:
    """Follows gradients and rates of one program; `keep` takes the findings."""

    def __init__(self, session: Session, judge: Judge, keep: Keep) -> None:
        self._session, self._judge, self._keep = session, judge, keep
        self._used: dict[int, Site] = {}
        self._shared: set[int] = set()
        self._rates: dict[int, list[tuple[float, Site]]] = {}

    def steps(self, optimizer: Any) -> None:
        """An optimizer is about to step outside every region: its gradients are used up."""
        site = self._session.site()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._used[self._session.roles.identity(parameter.grad)] = site

    def closed(self, roots: dict[str, Any]) -> None:
        """A capture has ended: which rates do groups of its optimizers share?"""
        for _, optimizer in hoststate.reachable(roots):
            if isinstance(optimizer, torch.optim.Optimizer):
                rates = [group["lr"] for group in optimizer.param_groups if isinstance(group.get("lr"), torch.Tensor)]
                numbers = [self._session.roles.identity(rate) for rate in rates]
                self._shared |= {number for number in numbers if numbers.count(number) > 1}

    def written(self, tensors: list[torch.Tensor], site: Site) -> None:
        """An operator outside every region has written these tensors."""
        for tensor in tensors:
            number = self._session.roles.identity(tensor)
            if number in self._used and not _in_step(site):
                del self._used[number]
            if number in self._shared and tensor.numel() == 1:
                with self._session.silence(), torch._C.DisableTorchFunction():
                    self._rates.setdefault(number, []).append((float(tensor.detach().clone()), site))

    def replaying(self, graph: Captured, here: Site) -> None:
        """A graph is about to replay."""
        added = _accumulates(graph.region)
        for number, op in added.items():
            if number in self._used:
                words = "has used up gradients that nothing zeroes before the next replay adds to them"
                finding = self._judge.finding("replaced-gradient", "optimizer.step", words, self._used[number])
                self._keep(finding, Related(op.site.filename, op.site.row, "the gradients are added up here"))
                break
        self._used.update(_stepped(graph.region, set(added)))
        for writes in self._rates.values():
            if len({value for value, _ in writes}) > 1:
                words = "writes over the rate that another group was given: the groups share one tensor"
                finding = self._judge.finding("shared-lr-tensor", "the learning rate", words, writes[-1][1])
                self._keep(finding, Related(here.filename, here.row, "replayed here"))
        self._rates.clear()


def _in_step(site: Site) -> bool:
    """Whether the optimizer's own arithmetic writes, and not `zero_grad`."""
    return any("torch/optim/" in part for part in site.inside) and not any("zero_grad" in part for part in site.inside)


def _accumulates(region: Region) -> dict[int, Op]:
    """Memory from outside that backward adds to, with the operator: nothing in the region has set it before."""
    found: dict[int, Op] = {}
    seen: set[int] = set()
    for op in region.trace.ops:
        for operand in op.operands:
            if operand.born < 0 and operand.storage not in seen:
                seen.add(operand.storage)
                if op.backward and op.name == "aten::add_" and op.operands[0].storage == operand.storage:
                    found[operand.storage] = op
    return found


def _stepped(region: Region, gradients: set[int]) -> dict[int, Site]:
    """Those gradients that an optimizer in the region uses up and nothing in the region zeroes after it."""
    used: dict[int, Site] = {}
    for op in region.trace.ops:
        touched = gradients & {operand.storage for operand in op.operands}
        if any("torch/optim/" in part for part in op.site.inside):
            used.update(dict.fromkeys(touched, op.site))
        if op.name in ("aten::zero_", "aten::_foreach_zero_", "aten::fill_"):
            for number in touched:
                used.pop(number, None)
    return used
