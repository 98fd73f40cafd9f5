"""Layers with lightning attention: linear attention with a fixed decay for each head."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Lightning:
    """Layers with lightning attention, and the factors of residual sums.

    heads, dim      of queries, keys and values
    scales          (stream, branch) factors of the sums of attention, lightning attention and MLP
    """

    heads: int
    dim: int
    scales: tuple[tuple[float, float], tuple[float, float], tuple[float, float]]

    def slopes(self, layer: int, layers: int) -> list[float]:
        """Return the decay of each head in a layer: a state keeps exp(-slope) for each token."""
        depth = 1 - layer / (layers - 1 + 1e-5) + 1e-5
        return [2 ** (-8 * (head + 1) / self.heads) * depth for head in range(self.heads)]

    def shapes(self, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the names and shapes of a layer's parameters."""
        rows = self.heads * self.dim
        yield "qkv_proj.weight", (3 * rows, hidden)
        yield "output_gate.weight", (rows, hidden)
        yield "norm.weight", (rows,)
        yield "out_proj.weight", (hidden, rows)
