"""4-bit quantization of a weight in one pass: codes, and the absmax of each block.

absmax = max |w| of a block        code of the level nearest to w / absmax, the lower of two levels

Dettmers, Pagnoni, Holtzman and Zettlemoyer, QLoRA, 2023; bytes are those of bitsandbytes.
"""

from functools import cache
from typing import Any

import numpy as np

from ...core.arrays import empty, lanes
from ...core.dtypes import FLOAT32, Array
from ...core.kernel import load
from ...core.op import op
from ...core.source import Constants
from ..common.checks import check_choice
from . import _four_bits

# Values of a thread, threads of a block: together 4096 values, the largest block of a weight.
VALUES, THREADS = 16, 256
UINT8 = np.dtype("uint8")
KINDS = ("nf4", "fp4")  # numbered as in _four_bits.KINDS


def _sizes(shape: tuple[int, ...], *, block: int = 64, kind: str = "nf4") -> dict[str, int]:
    """Return the sizes of the results' axes for a weight of this shape."""
    size = shape[0] * shape[1]
    return {"bytes": -(-size // 2), "blocks": -(-size // block)}


@op(
    "w(outputs, inputs) -> packed(bytes): byte, absmax(blocks): stat",
    no_gradient="its results are integers; products with such a weight have a gradient",
    sizes=_sizes,
)
def nf4_quantize_forward(w: Array, *, block: int = 64, kind: str = "nf4") -> tuple[Array, Array]:
    """Return packed codes and absmax of a weight: see ``nf4_quantize``.

    The absmax of a block with NaN or infinity is NaN or infinity.
    """
    return _four_bits.encode(w.astype(FLOAT32, copy=False), block, kind)


@nf4_quantize_forward.require
def _check(call: str, kind: str) -> None:
    """Raise ConfigError for an unknown kind."""
    check_choice(call, "kind", kind, KINDS)


@nf4_quantize_forward.kernel
def _launch(w: Array, block: int, kind: str) -> tuple[Array, Array]:
    """Return packed codes and absmax from the kernel."""
    packed = empty((-(-w.size // 2),), UINT8, like=w)
    absmax = empty((-(-w.size // block),), FLOAT32, like=w)
    constants = _constants(w.dtype, block, lanes(0, w), kind)
    kernel = load("nf4_quantize.cu", "nf4_quantize", w, constants)
    kernel[-(-w.size // (VALUES * THREADS)), THREADS](w, packed, absmax, w.size)
    return packed, absmax


@cache
def _constants(dtype: Any, block: int, lanes: int, kind: str) -> Constants:
    """Return the constants of nf4_quantize.cu.

    A thread has 16 values: 256 threads share the largest block of values, 2 threads the smallest.
    """
    number = KINDS.index(kind)
    return Constants(T=dtype, BLOCK=block, LANES=lanes, THREADS=THREADS, KIND=number)
