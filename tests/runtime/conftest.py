"""Every test here runs on the CPU against a fake graph backend, and once more on CUDA where there is a device (marker
`gpu`).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from graphlint.runtime.backend import GraphBackend  # noqa: E402
from graphlint.runtime.fake import FakeBackend  # noqa: E402
from graphlint.runtime.guard import capture_safe  # noqa: E402

torch.set_num_threads(1)
KINDS: list[Any] = ["fake"]
if torch.cuda.is_available():
    KINDS.append(pytest.param("cuda", marks=pytest.mark.gpu))


@dataclass
class Kit:
    """A device, a backend for it, and short ways to make things there."""

    device: str
    backend: GraphBackend

    def guard(self, fn: Any = None, **options: Any) -> Any:
        """`capture_safe` on this kit's backend."""
        return capture_safe(fn, backend=self.backend, **options)

    def randn(self, *shape: int, seed: int = 0, **options: Any) -> torch.Tensor:
        """The same numbers on every device."""
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(self.device, **options)

    def seed(self, seed: int) -> None:
        """Seeds the default generators."""
        torch.manual_seed(seed)


@pytest.fixture(params=KINDS)
def kit(request: pytest.FixtureRequest) -> Iterator[Kit]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    if request.param == "fake":
        yield Kit("cpu", FakeBackend())
    else:
        from graphlint.runtime.cuda import CudaBackend

        yield Kit("cuda", CudaBackend())
        torch.cuda.synchronize()
        gc.collect()
    torch.use_deterministic_algorithms(before)
