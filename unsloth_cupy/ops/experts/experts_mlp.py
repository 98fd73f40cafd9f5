"""The feed-forward layer of a mixture of experts.

y[row] = sum over k of weights[row, k] * (act(x[row] gate_up[e]^T) down[e]^T), e = experts[row, k]

An assignment is a pair (row, k).  Assignments are sorted by expert, so that each expert multiplies
all of its rows at once; the results of a row are added in the order of k.  Backward recomputes the
first product and the activation.

Shazeer et al., Outrageously Large Neural Networks, 2017.  Guo et al., SonicMoE, 2025: the gradient
of a weight is the dot of act with down^T dy.
"""

import math
from collections.abc import Iterator, Set
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ...core.arrays import contiguous, empty, lanes
from ...core.dtypes import FLOAT32, Array
from ...core.kernel import load
from ...core.op import op
from ...core.source import Constants
from ...errors import ConfigError, DTypeError, RangeError, ShapeError
from ..activations.geglu import geglu, geglu_backward
from ..activations.relu2 import relu2, relu2_backward
from ..activations.swiglu import sigmoid, swiglu, swiglu_backward
from ..common import faults
from ..common.checks import check_choice, requested_gradients
from ..common.gemm import gemm
from ..common.grouped import FORWARD, ROWS, WEIGHTS, add_rows, groups_of, multiply
from ..common.no_kernel import no_kernel
from ..linear.linear import flat
from .grouped_linear import dense_stack, parts, stack_like, traffic, without_kernel
from .route import Routes
from .sort_by_expert import by_expert, launch_sort

GATED = "swiglu", "swiglu_clamped", "geglu", "geglu_tanh"
ACTIVATIONS = *GATED, "relu2"  # numbered as in experts_mlp.cu
REPORTER = faults.reporter("experts_mlp", "routes.experts", "experts")
LIMIT, ALPHA = 7.0, 1.702  # of "swiglu_clamped", as in gpt-oss
THREADS = 128  # of a block


class Activation(NamedTuple):
    """The function between the two products: its name, and the numbers of "swiglu_clamped"."""

    name: str
    limit: float
    alpha: float


def experts_mlp(
    x: Array,
    gate_up: Array,
    down: Array,
    routes: Routes,
    gate_up_bias: Array | None = None,
    down_bias: Array | None = None,
    *,
    activation: str = "swiglu",
    limit: float | None = None,
    alpha: float | None = None,
) -> Array:
    """Return, for each row, the weighted sum of the results of its chosen experts.

    ``y[row] = sum_k w * (act(gate, up) @ down[e].T + down_bias[e])`` with ``[gate, up] = x[row] @
    gate_up[e].T + gate_up_bias[e]``, where e and w are the k-th expert of the row and its weight.
    act is

    - "swiglu": ``gate * sigmoid(gate) * up``
    - "geglu": ``gelu(gate) * up``; "geglu_tanh": with gelu's approximation by tanh
    - "swiglu_clamped": ``(up + 1) * gate * sigmoid(alpha * gate)``, with gate clipped to at most
      ``limit``, and up to -limit .. limit, as in gpt-oss
    - "relu2": ``max(up, 0)**2``, without a gate, as in Nemotron-H: gate_up contains only up

    Rows of x are not copied, and forward stores none of its intermediate arrays: backward
    recomputes the first product.

    Parameters
    ----------
    x : (*rows, hidden) float
    gate_up : (experts, 2 * inner, hidden) float, or a quantized stack
        For each expert, the rows of the gate, then the rows of up; without a gate (experts, inner,
        hidden).
    down : (experts, hidden, inner) float, or a quantized stack
        Quantized stacks are frozen, and are dequantized for one product at a time.
    routes : Routes
        The result of ``route``: experts, integers, and weights in the dtype of x or float32, both
        ``(*rows, k)``.
    gate_up_bias : (experts, 2 * inner) or (experts, inner) dtype of x or float32, optional
    down_bias : (experts, hidden) dtype of x or float32, optional
    activation : str
        "swiglu", "swiglu_clamped", "geglu", "geglu_tanh" or "relu2".
    limit, alpha : float, optional
        The numbers of "swiglu_clamped"; 7.0 and 1.702 by default.

    Returns
    -------
    y : (*rows, hidden) float
        The results of a row are added in float32, in the order of k, and rounded once.

    Raises
    ------
    RangeError
        An expert does not exist.  On a GPU the host does not read the experts: the row is NaN, and
        the next ``check_errors()`` raises.
    ConfigError
        activation is unknown, or does not use limit or alpha.
    ShapeError, DTypeError
        The arrays do not fit each other; the message shows the whole call.

    Examples
    --------
    >>> import numpy as np
    >>> from unsloth_cupy import experts_mlp, experts_mlp_backward, experts_mlp_forward
    >>> from unsloth_cupy import route, swiglu_mlp
    >>> rng = np.random.default_rng(0)
    >>> x, logits = rng.standard_normal((5, 8), np.float32), rng.standard_normal((5, 3))
    >>> gate_up = rng.standard_normal((3, 12, 8), np.float32)
    >>> down = rng.standard_normal((3, 8, 6), np.float32)
    >>> routes = route(logits.astype(np.float32), k=1)
    >>> y = experts_mlp(x, gate_up, down, routes)
    >>> e = routes.experts[0, 0]
    >>> alone = swiglu_mlp(x[:1], gate_up[e, :6], gate_up[e, 6:], down[e])
    >>> np.testing.assert_allclose(y[:1], alone, rtol=1e-4, atol=1e-5)
    >>> y, *kept = experts_mlp_forward(x, gate_up, down, *routes)
    >>> dx, dgate_up, ddown, _, dweights, _, _ = experts_mlp_backward(
    ...     np.ones_like(y), x, gate_up, down, *routes, None, None, *kept
    ... )
    >>> np.testing.assert_allclose(dweights[:, 0], y.sum(axis=1), rtol=1e-4, atol=1e-4)
    """
    pair: Any = routes
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        problem = f"routes is {type(routes).__name__}; pass the result of route"
        raise DTypeError(f"experts_mlp: {problem}, a pair of experts and weights")
    experts, weights = pair
    results: Any = experts_mlp_forward(
        x,
        gate_up,
        down,
        experts,
        weights,
        gate_up_bias,
        down_bias,
        activation=activation,
        limit=limit,
        alpha=alpha,
    )
    y: Array = results[0]
    return y


@op(
    "x(*rows, hidden), gate_up(experts, both, hidden): weight,"
    " down(experts, hidden, inner): weight, experts(*rows, k): int < experts,"
    " weights(*rows, k): param,"
    " gate_up_bias?(experts, both): param, down_bias?(experts, hidden): param"
    " -> y(*rows, hidden), order(*rows, k): int, offsets(experts+1): int, places(*rows, k): int",
    widen=False,  # products take 16-bit operands as they are
    operations=lambda a: _operations(a, 1, 1),
    traffic=lambda a: traffic(a, a["experts"].size),
)
def experts_mlp_forward(
    x: Array,
    gate_up: Array,
    down: Array,
    experts: Array,
    weights: Array,
    gate_up_bias: Array | None = None,
    down_bias: Array | None = None,
    *,
    activation: str = "swiglu",
    limit: float | None = None,
    alpha: float | None = None,
) -> tuple[Array, Array, Array, Array]:
    """Return y of ``experts_mlp``; then order, offsets and places (see ``Sorted``) for backward."""
    how = _activation(activation, limit, alpha)
    gate_up, down = stack_like(gate_up, x), stack_like(down, x)
    order, offsets, places = by_expert(experts, len(gate_up))
    k, wide = experts.shape[-1], np.promote_types(x.dtype, FLOAT32)
    rows, factors = flat(x), weights.reshape(-1).astype(wide)
    results = empty((len(order), x.shape[-1]), wide, like=x)
    for expert, part in _experts("experts_mlp", offsets, order, k):
        if part.start == part.stop:
            continue
        both = _first(rows[order[part] // k], gate_up, gate_up_bias, expert, wide)
        out = gemm(_activated(both, how), down[expert].T, dtype=wide)
        if down_bias is not None:
            out += down_bias[expert].astype(wide)
        out *= factors[order[part]][:, None]
        results[order[part]] = out
    # (*rows, k, hidden) to (*rows, hidden)
    y = results.reshape(*experts.shape, x.shape[-1]).sum(axis=-2)
    return y, order.reshape(experts.shape), offsets, places.reshape(experts.shape)


@experts_mlp_forward.kernel
def _launch(
    x: Array,
    gate_up: Array,
    down: Array,
    experts: Array,
    weights: Array,
    gate_up_bias: Array | None,
    down_bias: Array | None,
    activation: str,
    limit: float | None,
    alpha: float | None,
) -> Any:
    if (reason := without_kernel(gate_up, down)) is not None:
        return no_kernel(reason)
    how = _activation(activation, limit, alpha)
    x, experts, weights = map(contiguous, (x, experts, weights))
    count, hidden, inner = down.shape
    rows, k = x.size // hidden, experts.shape[-1]
    order, offsets, places = launch_sort(experts, count, places=True, who=REPORTER)
    groups = groups_of(x.dtype, offsets, count, rows * k, order, k)
    both = empty((rows * k, gate_up.shape[1]), x.dtype, like=x)
    stack = dense_stack(gate_up, offsets, x.dtype)
    multiply(FORWARD, x, stack, both, groups, bias=_dense(gate_up_bias), a_in_order=False)
    del stack  # a quantized stack is dense in it: free it before the next one is allocated
    act = empty((rows * k, inner), x.dtype, like=x)
    _launch_activation(both, act, how)
    del both
    out = empty((rows * k, hidden), x.dtype, like=x)
    multiply(FORWARD, act, dense_stack(down, offsets, x.dtype), out, groups, bias=_dense(down_bias))
    y = empty(x.shape, x.dtype, like=x)
    _combine(out, places, weights, y, k)
    return y, order, offsets, places


@experts_mlp_forward.gradient(widen=False)
def experts_mlp_backward(
    dy: Array,
    x: Array,
    gate_up: Array,
    down: Array,
    experts: Array,
    weights: Array,
    gate_up_bias: Array | None,
    down_bias: Array | None,
    order: Array,
    offsets: Array,
    places: Array,
    *,
    activation: str = "swiglu",
    limit: float | None = None,
    alpha: float | None = None,
    wanted: Set[str] | None = None,
) -> tuple[Array | None, ...]:
    """Return all gradients; None for a gradient that is not ``wanted``; 0 for unused experts."""
    how, wide = _activation(activation, limit, alpha), np.promote_types(x.dtype, FLOAT32)
    needed = _needed(wanted, x, gate_up, down, weights, gate_up_bias, down_bias)
    gate_up, down = stack_like(gate_up, x), stack_like(down, x)
    k, order, rows, drows = experts.shape[-1], order.reshape(-1), flat(x), flat(dy)
    factors = weights.reshape(-1).astype(wide)
    dweights = np.zeros_like(factors)
    moved = empty((len(order), x.shape[-1]), wide, like=x) if "x" in needed else None
    stacks = _stacks(gate_up, down, gate_up_bias, down_bias)
    sums = {n: empty(a.shape, a.dtype, like=x) for n, a in stacks.items() if n in needed}
    for expert, part in _experts("experts_mlp_backward", offsets, order, k):
        if part.start == part.stop:
            for each in sums.values():
                each[expert] = 0
            continue
        pairs = order[part]
        own, dout, factor = rows[pairs // k], drows[pairs // k], factors[pairs][:, None]
        both = _first(own, gate_up, gate_up_bias, expert, wide)
        d = gemm(dout, down[expert], dtype=wide)
        act = _activated(both, how)
        dweights[pairs] = (act * d).sum(axis=1)
        if down_bias is not None:
            bias = down_bias[expert].astype(wide)
            dweights[pairs] += gemm(dout.astype(wide), bias[:, None])[:, 0]
        if "down" in sums:
            act *= factor
            gemm(dout.T, act, out=sums["down"][expert])
        if "down_bias" in sums:
            sums["down_bias"][expert] = (dout * factor).sum(axis=0)
        d *= factor
        dboth = _activated_backward(d, both, how)
        if "gate_up_bias" in sums:
            sums["gate_up_bias"][expert] = dboth.sum(axis=0)
        if "gate_up" in sums:
            gemm(dboth.T, own, out=sums["gate_up"][expert])
        if moved is not None:
            moved[pairs] = gemm(dboth, gate_up[expert], dtype=wide)
    dx = None
    if moved is not None:
        # (*rows, k, hidden) to (*rows, hidden)
        dx = moved.reshape(*experts.shape, x.shape[-1]).sum(axis=-2)
    dweights = dweights.reshape(weights.shape)
    return (
        *(dx, sums.get("gate_up"), sums.get("down"), None),
        *(dweights if "weights" in needed else None, sums.get("gate_up_bias")),
        sums.get("down_bias"),
    )


@experts_mlp_backward.kernel
def _launch_backward(
    dy: Array,
    x: Array,
    gate_up: Array,
    down: Array,
    experts: Array,
    weights: Array,
    gate_up_bias: Array | None,
    down_bias: Array | None,
    order: Array,
    offsets: Array,
    places: Array,
    activation: str,
    limit: float | None,
    alpha: float | None,
    wanted: Set[str] | None,
) -> Any:
    if (reason := without_kernel(gate_up, down)) is not None:
        return no_kernel(reason)
    how = _activation(activation, limit, alpha)
    needed = _needed(wanted, x, gate_up, down, weights, gate_up_bias, down_bias)
    dy, x, experts, weights = map(contiguous, (dy, x, experts, weights))
    order, offsets, places = map(contiguous, (order, offsets, places))
    # the kernels read int32, which the forward call returns
    order, places = (a if a.dtype == np.int32 else a.astype(np.int32) for a in (order, places))
    count, hidden, inner = down.shape
    rows, k = x.size // hidden, experts.shape[-1]
    groups = groups_of(x.dtype, offsets, count, rows * k, order, k)
    both = empty((rows * k, gate_up.shape[1]), x.dtype, like=x)
    stack = dense_stack(gate_up, offsets, x.dtype)
    multiply(FORWARD, x, stack, both, groups, bias=_dense(gate_up_bias), a_in_order=False)
    del stack
    act = empty((rows * k, inner), x.dtype, like=x)  # down^T dy, then the weighted activations
    multiply(ROWS, dy, dense_stack(down, offsets, x.dtype), act, groups, a_in_order=False)
    dweights = empty(weights.shape, weights.dtype, like=x)
    own_bias = _dense(down_bias)
    chosen = _constants_of(x, weights, experts, own_bias, inner, hidden, k, count, how.name)
    kernel = load("experts_mlp.cu", "experts_backward", x, chosen)
    kernel[-(-rows * k * chosen["ROW_THREADS"] // THREADS), THREADS](
        *(both, act, weights, order, experts, own_bias, dy, dweights, rows * k),
        *(how.limit, how.alpha),
    )
    results: dict[str, Any] = {}
    stacks = _stacks(gate_up, down, gate_up_bias, down_bias)
    for name, stack in stacks.items():
        if name in needed:
            results[name] = empty(stack.shape, stack.dtype, like=x)
    if "down" in needed:
        multiply(WEIGHTS, dy, act, results["down"], groups, a_in_order=False)
    if "down_bias" in needed:
        add_rows(dy, results["down_bias"], groups, in_order=False, weights=weights)
    del act
    if "gate_up" in needed:
        multiply(WEIGHTS, both, x, results["gate_up"], groups, b_in_order=False)
    if "gate_up_bias" in needed:
        add_rows(both, results["gate_up_bias"], groups)
    dx = None
    if "x" in needed:
        moved = empty((rows * k, hidden), x.dtype, like=x)
        multiply(ROWS, both, dense_stack(gate_up, offsets, x.dtype), moved, groups)
        dx = empty(x.shape, x.dtype, like=x)
        _combine(moved, places, None, dx, k)
    return (
        *(dx, results.get("gate_up"), results.get("down"), None),
        *(dweights if "weights" in needed else None, results.get("gate_up_bias")),
        results.get("down_bias"),
    )


# ---- checks -------------------------------------------------------------------------------------
def _check(
    call: str,
    x: Any,
    gate_up: Any,
    down: Any,
    experts: Any,
    activation: str,
    limit: float | None,
    alpha: float | None,
) -> None:
    """Raise unless gate_up has the rows of gate and up, and the activation uses the options."""
    check_choice(call, "activation", activation, ACTIVATIONS)
    both, inner = gate_up.shape[1], down.shape[2]
    needed = 2 * inner if activation in GATED else inner
    if both != needed:
        problem = f"{call}: gate_up has {both} rows for each expert; down, with inner={inner},"
        raise ShapeError(
            f"{problem} and {activation!r} need {needed}", expected=needed, actual=both
        )
    if activation != "swiglu_clamped" and (limit is not None or alpha is not None):
        problem = f"activation {activation!r} uses neither; leave them out"
        raise ConfigError(f"{call}(limit={limit}, alpha={alpha}): {problem}")
    if limit is not None and not limit > 0:
        raise ConfigError(f"{call}(limit={limit}): limit must be above 0")
    if (assignments := math.prod(experts.shape)) >= 2**31:  # order and places are int32
        raise ShapeError(
            f"{call}: {assignments} assignments; the most is 2**31 - 1: pass fewer rows",
            expected="fewer rows",
            actual=assignments,
        )


experts_mlp_forward.require(_check)
experts_mlp_backward.require(_check)
experts_mlp_backward.facts["traffic"] = lambda a: traffic(a, a["experts"].size)
experts_mlp_backward.facts["operations"] = lambda a: _operations(
    a, 1 + sum(a.get(n) is not None for n in ("dx", "dgate_up")), 1 + (a.get("ddown") is not None)
)


def _operations(a: Any, gate_up: int, down: int) -> int:
    """Return the operations of ``gate_up`` and ``down`` products with these stacks."""
    (_, both, hidden), inner = a["gate_up"].shape, a["down"].shape[2]
    per_assignment = gate_up * both * hidden + down * hidden * inner
    operations: int = 2 * a["experts"].size * per_assignment
    return operations


def _needed(wanted: Set[str] | None, *arrays: Any) -> set[str]:
    """Return the names of the operands whose gradients are requested."""
    names = "x", "gate_up", "down", "weights", "gate_up_bias", "down_bias"
    operands = dict(zip(names, arrays, strict=True))
    return requested_gradients("experts_mlp_backward", wanted, **operands)


def _stacks(*arrays: Any) -> dict[str, Any]:
    """Return the stacks and biases, which have a part for each expert, by name."""
    return dict(zip(("gate_up", "down", "gate_up_bias", "down_bias"), arrays, strict=True))


def _activation(name: str, limit: float | None, alpha: float | None) -> Activation:
    return Activation(name, LIMIT if limit is None else limit, ALPHA if alpha is None else alpha)


# ---- by NumPy -----------------------------------------------------------------------------------
def _experts(call: str, offsets: Array, order: Any, k: int) -> Iterator[tuple[int, slice]]:
    """Yield each expert and the slice of order with its assignments, at most one for each row."""
    if (
        isinstance(order, np.ndarray)
        and order.size
        and (order.min() < 0 or order.max() >= order.size)
    ):
        problem = "order is not from the forward call; pass the results of experts_mlp_forward"
        raise RangeError(f"{call}: {problem}", expected=range(order.size), actual=int(order.max()))
    return parts(call, offsets, len(order), -(-len(order) // max(k, 1)))


def _first(rows: Array, gate_up: Array, bias: Array | None, expert: int, dtype: Any) -> Array:
    """Return the first product of an expert, gate and up: (rows, 2 * inner)."""
    both = gemm(rows, gate_up[expert].T, dtype=dtype)
    if bias is not None:
        both += bias[expert].astype(dtype)
    return both


def _halves(both: Array) -> tuple[Array, Array]:
    """Return gate and up."""
    inner = both.shape[1] // 2
    return both[:, :inner], both[:, inner:]


def _clamped(gate: Array, up: Array, how: Activation) -> tuple[Array, Array, Array]:
    """Return the clipped gate, the clipped up plus 1, and sigmoid(alpha * gate)."""
    gate, up = np.minimum(gate, how.limit), np.clip(up, -how.limit, how.limit)
    return gate, up + 1, sigmoid(gate * gate.dtype.type(how.alpha))


def _activated(both: Array, how: Activation) -> Array:
    """Return the activations of gate and up, in a new array (rows, inner)."""
    if how.name == "relu2":
        return relu2.definition(both)
    gate, up = _halves(both)
    if how.name == "swiglu_clamped":
        gate, up, sigma = _clamped(gate, up, how)
        return up * gate * sigma
    if how.name == "swiglu":
        return swiglu.definition(gate, up)
    return geglu.definition(gate, up, approximate=how.name == "geglu_tanh")


def _activated_backward(d: Array, both: Array, how: Activation) -> Array:
    """Return the gradient of the first product, from the gradient d of the activations."""
    if how.name == "relu2":
        return relu2_backward.definition(d, both)
    return np.concatenate(_gated_backward(d, *_halves(both), how), axis=1)


def _gated_backward(d: Array, gate: Array, up: Array, how: Activation) -> tuple[Array, Array]:
    """Return the gradients of gate and up."""
    if how.name == "swiglu_clamped":
        inside = gate <= how.limit, np.abs(up) <= how.limit
        gate, up, sigma = _clamped(gate, up, how)
        silu = gate * sigma
        dgate = d * up * (sigma + how.alpha * silu * (1 - sigma))
        return dgate * inside[0], d * silu * inside[1]
    if how.name == "swiglu":
        return swiglu_backward.definition(d, gate, up)
    return geglu_backward.definition(d, gate, up, approximate=how.name == "geglu_tanh")


# ---- by kernels ---------------------------------------------------------------------------------
def _dense(bias: Array | None) -> Array | None:
    return None if bias is None else contiguous(bias)


def _launch_activation(both: Array, act: Array, how: Activation) -> None:
    """Write the activations of gate and up, or of up alone, to act."""
    assignments, inner = act.shape
    width = lanes(inner, both, act)
    chosen = _constants(
        *(act.dtype, act.dtype, act.dtype, np.dtype(np.int32), inner, width, 1, 1),
        *(width, how.name, False, False),
    )
    kernel = load("experts_mlp.cu", "experts_activation", act, chosen)
    blocks = -(-act.size // (chosen["LANES"] * THREADS))
    kernel[blocks, THREADS](both, act, assignments, how.limit, how.alpha)


def _combine(out: Array, places: Array, weights: Array | None, y: Array, k: int) -> None:
    """Write to y the sum of each row's results, in the order of k."""
    hidden = out.shape[-1]
    dtype = y.dtype if weights is None else weights.dtype
    width = lanes(hidden, out, y)
    chosen = _constants(
        *(y.dtype, dtype, y.dtype, np.dtype(np.int32), width, hidden, k, 1),
        *(width, "swiglu", False, weights is not None),
    )
    kernel = load("experts_mlp.cu", "experts_combine", y, chosen)
    blocks = -(-y.size // (chosen["LANES"] * THREADS))
    kernel[blocks, THREADS](out, places, weights, y, y.size // hidden)


def _constants_of(
    x: Array,
    weights: Array,
    experts: Array,
    bias: Array | None,
    inner: int,
    hidden: int,
    k: int,
    count: int,
    name: str,
) -> Constants:
    """Return the constants of experts_backward, whose arrays of inner columns are new."""
    dtype = x.dtype if bias is None else bias.dtype
    # new arrays are aligned: the access has 16 bytes, or a power of two that divides inner
    wide = 16 // x.dtype.itemsize | inner
    return _constants(
        *(x.dtype, weights.dtype, dtype, experts.dtype, inner, hidden, k, count),
        *(wide & -wide, name, bias is not None, True),
    )


@cache
def _constants(
    dtype: Any,
    weights: Any,
    bias: Any,
    experts: Any,
    inner: int,
    hidden: int,
    k: int,
    count: int,
    lanes: int,
    activation: str,
    has_bias: bool,
    weighted: bool,
) -> Constants:
    """Return the constants of experts_mlp.cu; each kernel reads some of them.

    In backward, a row has a thread for each access, at most a warp; from 64 accesses on, a block.
    """
    accesses = -(-inner // lanes)
    of_row = min(32, 1 << (accesses - 1).bit_length()) if accesses < 64 else THREADS
    return Constants(
        T=dtype,
        W=weights,
        B=bias,
        I=experts,
        INNER=inner,
        HIDDEN=hidden,
        TOP=k,
        EXPERTS=count,
        LANES=lanes,
        THREADS=THREADS,
        ROW_THREADS=of_row,
        ACTIVATION=ACTIVATIONS.index(activation),
        BIAS=has_bias,
        WEIGHTED=weighted,
    )
