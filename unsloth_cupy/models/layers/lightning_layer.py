"""A layer with lightning attention in place of attention.

    q, k, v = silu(x A_qkv)         S_t = exp(-slope) S_(t-1) + k_t v_t^T         o_t = S_t^T q_t
    y = (norm(o) sigmoid(x A_gate)) A_out

The recurrence is that of Mamba2 with steps of 1.  A cache stores the states.  Padding before a text
does not change them.

Qin and others, Lightning Attention-2, 2024.
"""

import math
from typing import Any

import numpy as np

from ...core.dtypes import FLOAT32
from ...ops.activations.swiglu import swiglu
from ...ops.norms.rms_norm import rms_norm
from ...ops.recurrence.ssd import ssd
from ...parallel.taped import value_of
from ..configs.config import INNER_EPS
from .elements import gated, split, without_padding


def lightning_layer(call: Any, layer: int, module: str, x: Any) -> Any:
    """Return the output of the layer for normalised x."""
    parameters, rule, (batch, tokens, _) = call.parameters, call.config.lightning, x.shape
    states, mask, offsets = call.recurrence
    names = [f"{module}qkv_proj", f"{module}output_gate"]
    qkv, gate = call.project(parameters, names, x)
    qkv = swiglu(qkv, np.ones_like(value_of(qkv)))  # silu
    qkv = qkv if mask is None else without_padding(qkv, mask)
    q, k, v = split(qkv.reshape(batch, tokens, rule.heads, 3 * rule.dim), (rule.dim,) * 3)
    like, wide = value_of(v), np.promote_types(value_of(v).dtype, FLOAT32)
    slopes = [math.log(each) for each in rule.slopes(layer, call.config.layers)]
    steps = np.zeros_like(like, shape=(batch, tokens, rule.heads))  # softplus of them becomes 1
    state, *_ = states(layer)
    y, state = ssd(
        *(v, steps, np.asarray(slopes, wide, like=like), k, q),
        initial=state,
        offsets=offsets,
        dt_min=1.0,
        dt_max=1.0,
    )
    states(layer, tokens, state)
    y = y.reshape(batch, tokens, rule.heads * rule.dim)
    y = gated(rms_norm(y, parameters[f"{module}norm.weight"], eps=INNER_EPS), gate)
    return call.project(parameters, [f"{module}out_proj"], y)[0]
