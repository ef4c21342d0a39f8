"""What this machine reaches at best, measured in the run: matrix products by shape, and reading memory."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch
import torch.nn.functional as F

from gymtune.agents.models.packed import PackedProduct

from .counting import FP32, Product

COLD_BYTES = 256 << 20
"""More than caches hold: a model's weights come from memory at every step."""

_FLOPS = 20_000_000_000  # of a try: products of many rows are not bound by memory


class Ceilings:
    """Best times of `tries`, each measured once and kept. Data of `cold_bytes` is gone through at each try."""

    def __init__(self, tries: int = 5, *, cold_bytes: int = COLD_BYTES) -> None:
        self.tries, self.cold_bytes = tries, cold_bytes
        self._products: dict[tuple[int, int, int], float] = {}
        data = torch.ones(cold_bytes // FP32)
        self.bytes_per_second = cold_bytes / self._best(data.sum)

    def seconds(self, product: Product) -> float:
        """Return the least time of these products: the best of three ways (plain, turned, packed), weights cold."""
        shape = (product.rows, product.inner, product.columns)
        if shape not in self._products:
            self._products[shape] = self._measure(*shape)
        return self._products[shape] * product.times

    def _measure(self, rows: int, inner: int, columns: int) -> float:
        copies = min(self.cold_bytes // (FP32 * inner * columns), _FLOPS // (2 * rows * inner * columns)) or 1
        weights = [torch.randn(columns, inner) for _ in range(copies)]
        x = torch.randn(rows, inner)
        turned = x.t().contiguous()

        def linear() -> None:
            for weight in weights:
                F.linear(x, weight)

        def transposed() -> None:
            for weight in weights:
                torch.mm(weight, turned)

        with torch.inference_mode():
            best = min(self._best(linear), self._best(transposed))
            if PackedProduct.available():
                packed = [PackedProduct.of(weight) for weight in weights]
                best = min(best, self._best(lambda: [product(x) for product in packed]))
            return best / copies

    def _best(self, work: Callable[[], object]) -> float:
        work()
        seconds = []
        for _ in range(self.tries):
            began = perf_counter()
            work()
            seconds.append(perf_counter() - began)
        return min(seconds)

    @property
    def flops_per_second(self) -> float:
        """The highest rate of any product measured so far."""
        return max(2 * rows * inner * columns / t for (rows, inner, columns), t in self._products.items())

    def record(self) -> dict[str, float]:
        """Return GB/s and, by shape, GFLOP/s."""
        rates = {
            f"{rows}x{inner}x{columns} GFLOP/s": 2e-9 * rows * inner * columns / t
            for (rows, inner, columns), t in self._products.items()
        }
        return {"read GB/s": self.bytes_per_second / 1e9, **rates}
