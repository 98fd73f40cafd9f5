"""A weight as codes of 4 bits and the largest size of each block, in one pass.

absmax = max |w| of a block        code = the level nearest to w / absmax, the lower of two

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
from . import _four_bits

VALUES, THREADS = 16, 256  # that a thread keeps; of a block: one that shares 4096 values
UINT8 = np.dtype("uint8")


def _sizes(shape: tuple[int, ...], *, block: int = 64, fp4: bool = False) -> dict[str, int]:
    size = shape[0] * shape[1]
    return {"bytes": -(-size // 2), "blocks": -(-size // block)}


@op(
    "w(outputs, inputs) -> packed(bytes): byte, absmax(blocks): stat",
    no_gradient="its results are integers; products with such a weight have a gradient",
    sizes=_sizes,
)
def nf4_quantize_forward(w: Array, *, block: int = 64, fp4: bool = False) -> tuple[Array, Array]:
    """Return packed codes and absmax of a weight: see ``nf4_quantize``.

    A block that holds NaN or infinity has it for its absmax.
    """
    return _four_bits.encode(w.astype(FLOAT32, copy=False), block, fp4)


@nf4_quantize_forward.kernel
def _launch(w: Array, block: int, fp4: bool) -> tuple[Array, Array]:
    packed = empty((-(-w.size // 2),), UINT8, like=w)
    absmax = empty((-(-w.size // block),), FLOAT32, like=w)
    constants = _constants(w.dtype, block, lanes(0, w), fp4)
    kernel = load("nf4_quantize.cu", "nf4_quantize", w, constants)
    kernel[-(-w.size // (VALUES * THREADS)), THREADS](w, packed, absmax, w.size)
    return packed, absmax


@cache
def _constants(dtype: Any, block: int, lanes: int, fp4: bool) -> Constants:
    """Return the constants of nf4_quantize.cu.

    A thread keeps 16 values, so that 256 of them, a whole number of blocks of threads for an SM,
    share the largest block, and two the smallest.
    """
    return Constants(T=dtype, BLOCK=block, LANES=lanes, THREADS=THREADS, FP4=fp4)
