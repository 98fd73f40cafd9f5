"""Muon over named matrices."""

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..core.call import check_options, is_integer
from ..core.dtypes import Array, allowed
from ..errors import ConfigError
from ..ops.common.checks import check_choice
from ..ops.optimizers.host import host_step
from ..ops.optimizers.muon import ADJUSTMENTS, Tensor, muon
from .optimizer import Optimizer


@check_options
class Muon(Optimizer):
    """Muon: updates of matrices by their orthogonalised momentum, with one state per weight.

    The formula is in ``ops/optimizers/muon.py``.  Train embeddings, heads, norms and biases with
    another optimizer, such as ``AdamW``.  Matrix products of a step are in float32 (in torch in
    bfloat16).  Source: Jordan et al., Muon: An optimizer for hidden layers in neural networks,
    2024.

    Parameters
    ----------
    parameters : {name: array}
        Matrices: arrays of two axes.
    momentum : float
        Decay rate of the momentum, from 0 to below 1.
    nesterov : bool
        Nesterov momentum: add the gradient to the momentum once more, with weight 1 - momentum.
    adjust : str
        Factor of lr: "original", sqrt(max(1, rows / columns)), or "match_rms_adamw",
        0.2 sqrt(max(rows, columns)), for which lr and weight_decay of AdamW fit.
    parts : {name: (rows, rows, ...)}
        Matrices that are stored as one array, such as q, k and v: each is orthogonalised on its
        own.

    Other parameters, ``step``, ``state``, 16-bit parameters and errors are as in ``AdamW``.

    Raises
    ------
    ConfigError
        A parameter is not a matrix.
    """

    kind = Tensor

    def __init__(
        self,
        parameters: Mapping[str, Array],
        *,
        lr: float = 1e-3,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        adjust: str = "original",
        parts: Mapping[str, Sequence[int]] | None = None,
        groups: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        if not 0 <= momentum < 1:
            raise ConfigError(f"Muon: momentum={momentum}; pass a number from 0 to below 1")
        check_choice("Muon", "adjust", adjust, tuple(ADJUSTMENTS))
        self.options: dict[str, Any] = {
            "momentum": momentum,
            "nesterov": bool(nesterov),
            "adjust": adjust,
        }
        super().__init__(parameters, groups, lr=lr, weight_decay=weight_decay)
        sizes = {name: len(parameter) for name, parameter in self.parameters.items()}
        rows_by_name: Any = {} if parts is None else parts
        fits = isinstance(rows_by_name, Mapping) and all(
            isinstance(rows, tuple | list)
            and all(is_integer(each, 1) for each in rows)
            and sizes.get(name) == sum(rows)
            for name, rows in rows_by_name.items()
        )
        if not fits:
            cure = (
                "pass {name: rows of each matrix in it}, which add up to the rows of the parameter"
            )
            raise ConfigError(f"Muon(parts={reprlib.repr(parts)}): {cure}")
        self.parts: dict[str, Sequence[int]] = dict(rows_by_name)

    def _tensor(self, name: str, parameter: Any) -> Tensor:
        if parameter.ndim != 2:
            problem = f"Muon: {name} has shape {tuple(parameter.shape)}, but must be a matrix"
            raise ConfigError(f"{problem}; pass only matrices, and train all others with AdamW")
        wide = allowed("stat", parameter.dtype)[0]
        return Tensor(parameter, None, np.zeros_like(parameter, wide))

    def _update(self, name: str, gradient: Any, **options: Any) -> None:
        tensor = self.tensors[name]
        rows = self.parts.get(name) or (len(tensor.parameter),)
        host_step(muon, tensor, gradient, whole=True, parts=rows, **self.options, **options)
