"""Weights that stay packed as in a GGUF file: Q8_0, Q4_0 and MXFP4, in blocks of 32.

In a file, a block is its scale, then its codes.  If a byte has two codes, byte i has code i of the
block's first half in its low bits, and code i of the second half in its high bits.  In memory,
neighbouring codes share a byte.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from ...core.dtypes import FLOAT32, Array
from ...errors import ConfigError
from ...ops.quantized.blocks import BLOCK, Q40, Q80, Blocks
from ...ops.quantized.mxfp4 import Mxfp4
from ...ops.quantized.nf4_dequantize import powers_of_two
from ...ops.quantized.weight import Quantized
from ...placement import to_numpy
from ..quantizer import LEAST, SKIP, left_dense

CLASSES: Mapping[str, type[Blocks]] = {"Q4_0": Q40, "Q8_0": Q80, "MXFP4": Mxfp4}  # by gguf's names
TYPES_OF_STACKS = {kind: name for name, kind in CLASSES.items() if kind.OF_STACKS}


def packed_class(name: str, shape: tuple[int, ...], kind: str) -> type[Blocks] | None:
    """Return the class of a parameter that is stored in a type; None: it becomes dense."""
    return None if left_dense(name, shape, SKIP, LEAST) else CLASSES.get(kind)


def weight_of(
    kind: type[Blocks], arranged: Callable[[Mapping[str, Array]], Array], state: Mapping[str, Array]
) -> Blocks:
    """Return the weight from its blocks, (..., outputs, bytes), which ``arranged`` reorders."""
    data = arranged(state)
    scale = kind.SCALES.itemsize
    blocks = data.reshape(*data.shape[:-1], -1, scale + BLOCK // kind.VALUES)
    scales = np.ascontiguousarray(blocks[..., :scale]).view(kind.SCALES)[..., 0]
    codes = blocks[..., scale:]
    if kind.VALUES == 2:
        ordered = np.concatenate([codes & 15, codes >> 4], axis=-1)
        codes = ordered[..., ::2] | ordered[..., 1::2] << 4
    if not np.isfinite(powers_of_two()[scales] if scales.dtype == np.uint8 else scales).all():
        problem = f"a block of {kind.KIND} has a scale that is not finite"
        raise ConfigError(f"load: {problem}; fetch the file again")
    packed = np.ascontiguousarray(codes).view(kind.CODES)
    return kind(packed.reshape(*data.shape[:-1], -1), scales, dtype=FLOAT32)


def maker(
    kind: type[Blocks], arranged: Callable[[Mapping[str, Array]], Array]
) -> Callable[[Mapping[str, Array]], Any]:
    """Return the function from the blocks of a file to a parameter."""
    return partial(weight_of, kind, arranged)


def blocks_of(weight: Quantized, kind: str) -> Array | None:
    """Return the blocks of a weight, (..., outputs, bytes); None if it has another type."""
    if type(weight) is not CLASSES.get(kind) or not isinstance(weight, Blocks):
        return None
    packed, scales = to_numpy(weight.packed), to_numpy(weight.scales)
    codes = packed.view(np.uint8).reshape(*scales.shape, -1)
    if weight.VALUES == 2:
        ordered = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*scales.shape, BLOCK)
        codes = ordered[..., : BLOCK // 2] | ordered[..., BLOCK // 2 :] << 4
    halves = scales[..., None].view(np.uint8)
    blocks = np.concatenate([halves, codes], axis=-1)
    return blocks.reshape(*scales.shape[:-1], -1)
