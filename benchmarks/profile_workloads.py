"""Steps to profile: launch-bound, compute-bound, in between, with synchronisations, with shapes that change.

Each `make_*` returns `(step, batches)`: `step(*batches(i))` is iteration `i`. All need a CUDA device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Made = tuple[Callable[..., Any], Callable[[int], tuple[Any, ...]]]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, context: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _tokens(vocabulary: int, batch: int, context: int) -> Callable[[int], tuple[Any, ...]]:
    generator = torch.Generator("cuda").manual_seed(0)
    drawn = torch.randint(vocabulary, (8, batch, context + 1), device="cuda", generator=generator)
    return lambda i: (drawn[i % 8, :, :-1].contiguous(), drawn[i % 8, :, 1:].contiguous())


def _gpt(layers: int, width: int, batch: int, context: int, read_loss: bool = False) -> Made:
    torch.manual_seed(0)
    vocabulary = 1024
    model = GPT(layers, width, max(1, width // 64), vocabulary, context).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, capturable=True)

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> Any:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            loss = F.cross_entropy(model(tokens).view(-1, vocabulary), targets.reshape(-1))
        loss.backward()
        optimizer.step()
        return loss.item() if read_loss else loss.detach()

    return step, _tokens(vocabulary, batch, context)


def make_small_gpt() -> Made:
    """Launch-bound: a character model."""
    return _gpt(layers=6, width=256, batch=8, context=128)


def make_medium_gpt() -> Made:
    """In between."""
    return _gpt(layers=8, width=1024, batch=16, context=512)


def make_large_gpt() -> Made:
    """Compute-bound."""
    return _gpt(layers=6, width=2048, batch=32, context=1024)


def make_small_gpt_reading_loss() -> Made:
    """The small model, with `loss.item()` in the step."""
    return _gpt(layers=6, width=256, batch=8, context=128, read_loss=True)


def make_mlp_inference() -> Made:
    """Launch-bound inference: many small layers, no backward."""
    torch.manual_seed(0)
    layers = [part for _ in range(24) for part in (nn.Linear(512, 512), nn.LayerNorm(512), nn.SiLU())]
    model = nn.Sequential(*layers).cuda().eval()
    x = torch.randn(8, 64, 512, device="cuda")

    @torch.no_grad()
    def step(x: torch.Tensor) -> torch.Tensor:
        return model(x)

    return step, lambda i: (x[i % 8],)


def make_mixed() -> Made:
    """A launch-bound head behind a compute-bound trunk: one part is worth a graph, the other is not."""
    torch.manual_seed(0)

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = nn.Sequential(*(nn.Conv2d(256, 256, 3, padding=1) for _ in range(4)))
            layers = [m for _ in range(30) for m in (nn.Linear(256, 256), nn.LayerNorm(256), nn.GELU())]
            self.head = nn.Sequential(*layers)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.trunk(x).mean((2, 3)))

    model = Mixed().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
    x = torch.randn(4, 48, 256, 40, 40, device="cuda")

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, lambda i: (x[i % 4],)


def make_detection() -> Made:
    """Detection-style: the number of targets changes with every batch, and so do the kernels' shapes."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 32, 3, 2, 1), nn.SiLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.SiLU(), nn.Conv2d(64, 8, 1)]
    model = nn.Sequential(*layers).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
    images = torch.randn(8, 4, 3, 128, 128, device="cuda")
    counts = (5, 17, 9, 31, 3, 22, 12, 40)
    boxes = [torch.rand(n, 4, device="cuda") for n in counts]

    def step(image: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        found = model(image).flatten(2).permute(0, 2, 1)[..., :4].reshape(-1, 4).sigmoid()
        distance = (found[:, None] - targets[None]).abs().sum(-1)
        loss = distance.min(0).values.mean() + distance.min(1).values.mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, lambda i: (images[i % 8], boxes[i % 8])
