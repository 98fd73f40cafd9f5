"""Products with quantized weights, compared with products with the dense weight.

    cd asv_benchmarks && python -m benchmarks.quantized

prints the tables of docs/guide/quantization.md.  Times are CPU time of all threads; dense and
quantized calls alternate, and the result is the median of the ratios of neighbouring calls.
"""

import functools
import gc
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np

from unsloth_cupy import Ternary, linear, linear_backward, ternary_linear
from unsloth_cupy.models.quantized import error_of
from unsloth_cupy.models.quantizer import CHOICES, KINDS

from .savings import median_ratio, ratios

SIZE = 4096
FEW, MANY = (1, 16, 512), 512
MIB = 2**20


@functools.cache
def drawn(size: int) -> np.ndarray[Any, Any]:
    """Return a square weight with normally distributed values, as in a layer of a model."""
    draw = np.random.default_rng(0)
    return draw.standard_normal((size, size), np.float32) * np.float32(size**-0.5)


def dense() -> np.ndarray[Any, Any]:
    """Return the dense weight."""
    return drawn(SIZE)


@functools.cache
def coded(kind: str, size: int) -> Any:
    """Return a weight of this size and kind: quantized or dense."""
    return drawn(size) if kind == "dense" else KINDS[kind].make(drawn(size))


def weight(kind: str) -> Any:
    """Return the weight of a kind: quantized or dense."""
    return coded(kind, SIZE)


def rows_of(rows: int) -> np.ndarray[Any, Any]:
    """Return an input with this many rows."""
    return np.random.default_rng(1).standard_normal((rows, SIZE), np.float32)


class Linear:
    """``linear`` of float32 rows, and the gradient of the rows."""

    version, timeout = "1", 600
    params = (["dense", *CHOICES], list(FEW))
    param_names = ("kind", "rows")

    def setup(self, kind: str, rows: int) -> None:
        """Create the weight and the rows."""
        self.weight, self.rows = weight(kind), rows_of(min(rows, SIZE))

    def time_forward(self, kind: str, rows: int) -> None:
        """Compute the product."""
        linear(self.rows, self.weight)

    def time_gradient(self, kind: str, rows: int) -> None:
        """Compute the gradient of the rows."""
        linear_backward(self.rows, self.rows, self.weight, None, wanted={"x"})

    def track_peak(self, kind: str, rows: int) -> int:
        """Return the peak of the bytes that are allocated beyond the result."""
        return peak(lambda: linear(self.rows, self.weight), self.rows.nbytes)


class Weight:
    """Size and error of a quantized weight, and the time to quantize it."""

    version = "1"
    params = tuple(CHOICES)
    param_names = ("kind",)

    def setup(self, kind: str) -> None:
        """Create the weight."""
        weight(kind)

    def time_quantize(self, kind: str) -> None:
        """Quantize the dense weight."""
        KINDS[kind].make(dense())

    def track_bits(self, kind: str) -> float:
        """Return the bits for each value, including scales and other metadata."""
        return float(8 * weight(kind).nbytes / dense().size)

    def track_percent_lost(self, kind: str) -> float:
        """Return the norm of the error as a percentage of the weight's norm."""
        return 100 * error_of(dense(), weight(kind))[0]


def peak(run: Callable[[], Any], result: int) -> int:
    """Return the peak of the bytes that ``run`` allocates, beyond those of its result."""
    run()
    gc.collect()
    tracemalloc.start()
    output = run()
    beyond = tracemalloc.get_traced_memory()[1] - result
    tracemalloc.stop()
    del output
    return max(1, beyond)


@functools.cache
def sparse(percent: int) -> Ternary:
    """Return a ternary weight with this percentage of zeros."""
    rng = np.random.default_rng(2)
    codes = rng.choice(np.array([-1, 1], np.int8), (SIZE, SIZE))
    codes[rng.random((SIZE, SIZE)) < percent / 100] = 0
    return Ternary.from_codes(codes, np.float32(0.02))


class Zeros:
    """Seconds of ``ternary_linear`` for few rows and a weight with this percentage of zeros."""

    version = "1"
    params = ([50, 80, 90, 95, 99], [1, 4])
    param_names = ("percent", "rows")

    def setup(self, percent: int, rows: int) -> None:
        """Create the weight and the rows, and call once, which may build the sparse form."""
        self.weight, self.rows = sparse(percent), rows_of(rows)
        ternary_linear(self.rows, self.weight)

    def time_product(self, percent: int, rows: int) -> None:
        """Compute the product."""
        ternary_linear(self.rows, self.weight)


def zeros_row(percent: int) -> list[str]:
    """Return the cells of the table row for a percentage of zeros."""
    weight, cells = sparse(percent), []
    whole = weight.dequantize()
    for rows in Zeros.params[1]:
        x = rows_of(int(rows))
        calls = (functools.partial(linear, x, whole), functools.partial(ternary_linear, x, weight))
        cells.append(f"{median_ratio(ratios(*calls)):.2f}")
    stored = [weight.nbytes, *(a.nbytes for part in weight.sparse_parts or () for a in parts(part))]
    return [f"{percent} %", *cells, f"{8 * sum(stored) / whole.size:.1f}"]


def parts(csr: Any) -> tuple[Any, ...]:
    """Return the arrays of a CSR array."""
    return csr.data, csr.indices, csr.indptr


def row_of(kind: str) -> list[str]:
    """Return the cells of a kind's row in the table."""
    codes, bench, back = weight(kind), Weight(), functools.partial(linear_backward, bias=None)
    cells = [f"{bench.track_bits(kind):.2f}", f"{bench.track_percent_lost(kind):.1f} %"]
    for rows in FEW:
        x = rows_of(rows)
        pairs = ratios(functools.partial(linear, x, dense()), functools.partial(linear, x, codes))
        cells.append(f"{median_ratio(pairs):.2f}")
    x = rows_of(MANY)
    calls = (functools.partial(back, x, x, w, wanted={"x"}) for w in (dense(), codes))
    cells.append(f"{median_ratio(ratios(*calls)):.2f}")
    beyond = peak(functools.partial(linear, x, codes), x.nbytes)
    return [kind, *cells, f"{beyond / MIB:.1f} MiB"]


def main() -> None:
    """Print the tables."""
    print("| kind | bits a value | lost | 1 row | 16 rows | 512 rows | dx of 512 | beyond y |")
    print("|---|---|---|---|---|---|---|---|")
    for kind in CHOICES:
        print(f"| {' | '.join(row_of(kind))} |", flush=True)
    print("\n| zeros | 1 row | 4 rows | bits a value |\n|---|---|---|---|")
    for percent in Zeros.params[0]:
        print(f"| {' | '.join(zeros_row(percent))} |", flush=True)


if __name__ == "__main__":
    main()
