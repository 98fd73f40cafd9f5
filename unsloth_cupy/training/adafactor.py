"""Adafactor over named parameters."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..core.call import check_options, is_number
from ..core.dtypes import Array, allowed
from ..errors import ConfigError
from ..ops.optimizers.adafactor import Tensor, adafactor
from ..ops.optimizers.host import host_step
from .optimizer import Optimizer


@check_options
class Adafactor(Optimizer):
    """Adafactor: Adam with a factored second moment, a row and a column per matrix.

    The states need hardly any memory.  Formula (``ops/optimizers/adafactor.py``) and defaults are
    those of torch.optim.
    Source: Shazeer and Stern, Adafactor: Adaptive Learning Rates with Sublinear Memory Cost, 2018.

    Parameters
    ----------
    lr : float
        Maximum relative step: the change divided by the root mean square (RMS) of a parameter.
        Step n uses at most 1 / sqrt(n).
    beta2_decay : float
        Below 0: the decay rate of the moments is 1 - step**beta2_decay.
    eps : (float or None, float)
        Minimum of the root of a second moment, None for the rounding error of float32 (float64);
        and minimum of the RMS of a parameter in the relative step.
    d : float
        Clipping threshold, above 0: an update with a larger RMS is scaled down to it.

    Other parameters, ``step``, ``state``, 16-bit parameters and errors are as in ``AdamW``.
    """

    kind = Tensor

    def __init__(
        self,
        parameters: Mapping[str, Array],
        *,
        lr: float = 1e-2,
        beta2_decay: float = -0.8,
        eps: Sequence[float | None] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        groups: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        if not -math.inf < beta2_decay <= 0:
            raise ConfigError(f"Adafactor: beta2_decay={beta2_decay}; pass a number, 0 or less")
        if not 0 < d < math.inf:
            raise ConfigError(f"Adafactor: d={d}; pass a finite number above 0")
        pair = isinstance(eps, tuple | list) and len(eps) == 2
        numbers: list[Any] = [*eps[eps[0] is None :]] if pair else [None]
        if not all(is_number(e) and 0 <= e < math.inf for e in numbers):
            raise ConfigError(f"Adafactor: eps={eps}; pass two numbers, 0 or more, or (None, 1e-3)")
        self.options: dict[str, Any] = {"beta2_decay": beta2_decay, "eps": (eps[0], eps[1]), "d": d}
        super().__init__(parameters, groups, lr=lr, weight_decay=weight_decay)

    def _tensor(self, name: str, parameter: Any) -> Tensor:
        wide, shape = allowed("stat", parameter.dtype)[0], parameter.shape
        if len(shape) < 2:
            return Tensor(parameter, None, None, None, np.zeros_like(parameter, wide))
        sizes = shape[:-1], (*shape[:-2], shape[-1])
        row, column = (np.zeros_like(parameter, wide, order="C", shape=size) for size in sizes)
        return Tensor(parameter, None, row, column, None)

    def _begin(self, rate: float) -> dict[str, Any]:
        return {"step": int(self.numbers["steps"]), **self.options}

    def _update(self, name: str, gradient: Any, **options: Any) -> None:
        host_step(adafactor, self.tensors[name], gradient, whole=True, **options)
