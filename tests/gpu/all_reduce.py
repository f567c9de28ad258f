"""Two processes train with an all-reduce inside the guarded step, their own or that of DistributedDataParallel; run by
tests/gpu/test_guard.py through torchrun, with `ddp` as an argument for the latter.
"""

from __future__ import annotations

import os
import sys
import warnings

import torch
import torch.distributed as dist

from graphlint.runtime.guard import capture_safe


def run(guarded: bool, rank: int, ddp: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    m: torch.nn.Module = torch.nn.Linear(16, 16).cuda()
    if ddp:
        with torch.cuda.stream(torch.cuda.Stream()):  # as torch asks for: its hooks remember the stream
            m = torch.nn.parallel.DistributedDataParallel(m, device_ids=[rank])
        torch.cuda.synchronize()
    o = torch.optim.AdamW(m.parameters(), lr=torch.tensor(1e-3, device="cuda"), capturable=True)

    def step(x: torch.Tensor) -> torch.Tensor:
        o.zero_grad()
        loss = m(x).square().mean()
        loss.backward()
        for p in m.parameters() if not ddp else ():
            dist.all_reduce(p.grad)
        o.step()
        return loss

    fn = capture_safe(step) if guarded else step
    for i in range(10):
        fn(torch.full((4, 16), float(i + rank), device="cuda"))
    weights = [p.detach().clone() for p in m.parameters()]
    if guarded:
        fn.reset()  # graphs hold the communicator: they go before it
    return weights


def main() -> None:
    warnings.simplefilter("ignore")
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    ddp = "ddp" in sys.argv
    eager, guarded = run(False, rank, ddp), run(True, rank, ddp)
    assert all(torch.equal(a, b) for a, b in zip(eager, guarded, strict=True))
    print("equal", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
