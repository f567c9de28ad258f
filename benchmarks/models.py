"""Models of well-known libraries through the guard, as they are: does it capture, is it right, what is gained.

    python benchmarks/models.py --output benchmarks/results/models.jsonl [NAME ...]

Needs a CUDA device; a workload whose library is missing is left out, and says so. Each is built twice from one seed,
stepped eagerly and behind `capture_safe`, and the results compared. One JSON line per workload: `outcome` (`replayed`,
or the rule and line that refused it), `same` (`bitwise`, or the largest relative difference of the results after 20
steps), `first_s` (seconds that the first three calls take), `eager_ms`, `guard_ms` (median time of a step), `gain`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from graphlint import capture_safe
from graphlint.runtime.errors import CaptureError

STEPS = 20
Step = Callable[..., Any]
Batches = Callable[[int], tuple[Any, ...]]
Made = tuple[Step, Batches, dict[str, Any]]


def _seeded(*shape: int, seed: int, high: int = 0) -> torch.Tensor:
    """The same numbers for every run: normal, or integers below `high`."""
    generator = torch.Generator("cuda").manual_seed(seed)
    if high:
        return torch.randint(0, high, shape, device="cuda", generator=generator)
    return torch.randn(shape, device="cuda", generator=generator)


def _classifier(model: nn.Module, optimizer: torch.optim.Optimizer, autocast: bool) -> Step:
    def step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
            loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def timm_resnet18() -> Made:
    """Training, BatchNorm, channels last, SGD with momentum and a learning rate that is a number."""
    import timm

    model = timm.create_model("resnet18", num_classes=10).cuda().to(memory_format=torch.channels_last)
    step = _classifier(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), autocast=False)

    def batch(i: int) -> tuple[Any, ...]:
        images = _seeded(16, 3, 64, 64, seed=i).to(memory_format=torch.channels_last)
        return images, _seeded(16, seed=i, high=10)

    return step, batch, {}


def timm_vit_tiny() -> Made:
    """Training with autocast, drop path and fused AdamW."""
    import timm

    model = timm.create_model("vit_tiny_patch16_224", num_classes=10, drop_path_rate=0.1).cuda()
    step = _classifier(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True, capturable=True), True)
    return step, lambda i: (_seeded(8, 3, 224, 224, seed=i), _seeded(8, seed=i, high=10)), {}


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
    )
    return LlamaForCausalLM(config).cuda()


def llama_training() -> Made:
    """A small Llama of transformers, its own loss, gradient clipping."""
    model = _llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, capturable=True)

    def step(ids: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    return step, lambda i: (_seeded(4, 128, seed=i, high=2048),), {}


def llama_decode() -> Made:
    """One token at a time into a static cache of transformers."""
    from transformers import StaticCache

    model = _llama().eval().requires_grad_(False)
    cache = StaticCache(config=model.config, max_cache_len=256)

    @torch.no_grad()
    def step(token: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        logits = model(input_ids=token, past_key_values=cache, cache_position=place, use_cache=True).logits
        return logits[:, -1].float()

    return step, lambda i: (_seeded(4, 1, seed=i, high=2048), torch.tensor([i], device="cuda")), {}


def bert_scaler() -> Made:
    """BERT with dropout and a padding mask, fp16 with a gradient scaler."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024)
    model = BertForSequenceClassification(config).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=True)
    scaler = torch.amp.GradScaler("cuda")

    def step(ids: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    def batch(i: int) -> tuple[Any, ...]:
        lengths = 32 + _seeded(8, seed=i, high=96)
        mask = (torch.arange(128, device="cuda")[None] < lengths[:, None]).long()
        return _seeded(8, 128, seed=i, high=30000), mask, _seeded(8, seed=i, high=2)

    return step, batch, {}


def faster_rcnn() -> Made:
    """Detection: shapes depend on what is found, so this has to be refused."""
    from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_320_fpn

    model = fasterrcnn_mobilenet_v3_large_320_fpn(weights=None, weights_backbone=None, num_classes=5).cuda().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(image: torch.Tensor, boxes: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        losses = model([image], [{"boxes": boxes, "labels": labels}])
        loss = sum(losses.values())
        loss.backward()
        optimizer.step()
        return loss.detach()

    boxes = torch.tensor([[10.0, 10.0, 100.0, 120.0], [50.0, 40.0, 200.0, 180.0]], device="cuda")
    return step, lambda i: (_seeded(3, 320, 320, seed=i), boxes + i, torch.tensor([1, 2], device="cuda")), {}


def graph_convolution() -> Made:
    """Two layers of torch_geometric on a fixed graph."""
    from torch_geometric.nn import GCNConv

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = GCNConv(64, 64), GCNConv(64, 7)

        def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
            x = nn.functional.dropout(self.first(x, edges).relu(), 0.5, self.training)
            return self.second(x, edges)

    model, edges = Net().cuda(), _seeded(2, 4000, seed=0, high=1000)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, capturable=True)

    def step(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(model(x, edges), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, lambda i: (_seeded(1000, 64, seed=i), _seeded(1000, seed=i, high=7)), {}


def adversarial() -> Made:
    """Two networks and two optimizers in one step, spectral norm in the critic."""
    maker = nn.Sequential(nn.Linear(32, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 64)).cuda()
    norm = nn.utils.parametrizations.spectral_norm
    critic = nn.Sequential(norm(nn.Linear(64, 128)), nn.LeakyReLU(0.2), norm(nn.Linear(128, 1))).cuda()
    first = torch.optim.Adam(critic.parameters(), lr=2e-4, capturable=True)
    second = torch.optim.Adam(maker.parameters(), lr=2e-4, capturable=True)
    score = nn.functional.binary_cross_entropy_with_logits

    def step(real: torch.Tensor) -> torch.Tensor:
        fake = maker(torch.randn(real.shape[0], 32, device="cuda"))
        seen, made = critic(real), critic(fake.detach())
        critic_loss = score(seen, torch.ones_like(seen)) + score(made, torch.zeros_like(made))
        first.zero_grad(set_to_none=True)
        critic_loss.backward()
        first.step()
        made = critic(fake)
        loss = score(made, torch.ones_like(made))
        second.zero_grad(set_to_none=True)
        loss.backward()
        second.step()
        return torch.stack([critic_loss.detach(), loss.detach()])

    return step, lambda i: (_seeded(64, 64, seed=i),), {}


WORKLOADS: dict[str, Callable[[], Made]] = {
    make.__name__: make
    for make in (
        timm_resnet18,
        timm_vit_tiny,
        llama_training,
        llama_decode,
        bert_scaler,
        graph_convolution,
        adversarial,
        faster_rcnn,
    )
}


def trained(make: Callable[[], Made], guarded: bool) -> tuple[list[torch.Tensor], Any, Batches, float]:
    """Results of 20 steps from one seed, the step, its batches, and the seconds of the first three calls."""
    torch.manual_seed(0)
    step, batches, options = make()
    called: Any = capture_safe(step, **options) if guarded else step
    torch.manual_seed(1)
    results, first = [], 0.0
    for i in range(STEPS):
        start = time.perf_counter()
        out = called(*batches(i))
        results.append(out.clone())
        torch.cuda.synchronize()
        first += time.perf_counter() - start if i < 3 else 0.0
    return results, called, batches, first


def milliseconds(step: Step, args: tuple[Any, ...]) -> float:
    """Median time of a step, device included."""
    times = []
    for _ in range(15):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(5):
            step(*args)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / 5 * 1e3)
    return statistics.median(times)


def measured(name: str) -> dict[str, Any]:
    """One row."""
    make = WORKLOADS[name]
    try:
        want, eager, batches, _ = trained(make, guarded=False)
    except ImportError as error:
        return {"workload": name, "outcome": f"left out: {error}"}
    try:
        have, guard, _, first = trained(make, guarded=True)
    except CaptureError as error:
        place = f"{Path(error.filename).name}:{error.lineno}" if error.filename else ""
        return {"workload": name, "outcome": error.rule, "at": place, "line": error.source_line, "said": error.reason}
    bitwise = all(torch.equal(a, b) for a, b in zip(want, have, strict=True))
    worst = max(((a - b).abs().max() / a.abs().max().clamp_min(1e-9)).item() for a, b in zip(want, have, strict=True))
    args = batches(STEPS - 1)
    times = milliseconds(eager, args), milliseconds(guard, args)
    return {
        "workload": name,
        "outcome": "replayed",
        "same": "bitwise" if bitwise else f"within {worst:.1e}",
        "first_s": round(first, 2),
        "eager_ms": round(times[0], 3),
        "guard_ms": round(times[1], 3),
        "gain": round(times[0] / times[1], 2),
    }


def main() -> None:
    """Prints and writes the rows."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=list(WORKLOADS))
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.use_deterministic_algorithms(False)
    warnings.simplefilter("ignore")
    versions = {}
    for library in ("timm", "transformers", "torchvision", "torch-geometric"):
        try:
            versions[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            continue
    head = {"bench": "models", "who": torch.cuda.get_device_name(), "torch": str(torch.__version__), **versions}
    rows: list[dict[str, Any]] = [{**head, "command": "python benchmarks/models.py"}]
    for name in options.names or WORKLOADS:
        rows.append(measured(name))
        print(json.dumps(rows[-1]), flush=True)
    if options.output is not None:
        options.output.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("benchmarks/models.py needs a CUDA device")
    main()
