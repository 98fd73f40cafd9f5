"""Attention over divided tokens equals that of one device, in 1e-5: result and gradients."""

import numpy as np

from unsloth_cupy import attention
from unsloth_cupy.parallel import Communicator, ring_attention, ring_order

from .layers import learned
from .ranks import close

OPTIONS = (
    {},
    {"causal": True},
    {"causal": True, "window": (5, 0)},  # most pieces see nothing of the others
    {"window": (2, 3), "softcap": 1.5},
    {"causal": True, "scale": 0.7, "softcap": 2.0},
)


def all_checks(comm: Communicator) -> None:
    rng = np.random.default_rng(1)
    for options in OPTIONS:
        shapes = ((2, 24, 4, 8), (2, 24, 2, 8), (2, 24, 2, 6), (2, 24, 4, 6))
        *arrays, dy = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
        order = ring_order(24, comm, causal=options.get("causal", False))
        wanted = learned(lambda *qkv: attention(*qkv, **options), arrays, dy)  # noqa: B023
        found = learned(
            lambda *qkv: ring_attention(*qkv, comm, **options),  # noqa: B023
            [x[:, order] for x in arrays],
            dy[:, order],
        )
        for one, other in zip(found, wanted, strict=True):
            close(one, other[:, order])
