"""Lion over named parameters."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..core.call import check_options
from ..core.dtypes import Array, allowed
from ..ops.optimizers.host import host_step
from ..ops.optimizers.lion import LionLauncher, Tensor, lion
from .optimizer import Optimizer, checked_betas


@check_options
class Lion(Optimizer):
    """Lion: updates by the sign of a momentum, with one state per weight.

    The formula is in ``ops/optimizers/lion.py``.  A good lr is a tenth to a third of AdamW's.
    Source: Chen et al., Symbolic Discovery of Optimization Algorithms, 2023.

    Parameters
    ----------
    lr : float
        Change per element, in steps that are called without a rate.
    betas : (float, float)
        Weight of the momentum in the update, and decay rate of the momentum.

    Other parameters, ``step``, ``state``, 16-bit parameters and errors are as in ``AdamW``.
    """

    kind = Tensor

    def __init__(
        self,
        parameters: Mapping[str, Array],
        *,
        lr: float = 1e-4,
        betas: Sequence[float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        groups: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self.betas = checked_betas("Lion", betas)
        super().__init__(parameters, groups, lr=lr, weight_decay=weight_decay)

    def _tensor(self, name: str, parameter: Any) -> Tensor:
        wide = allowed("stat", parameter.dtype)[0]
        return Tensor(parameter, None, np.zeros_like(parameter, wide))

    def _launcher(self, tensors: Mapping[str, Any]) -> LionLauncher:
        return LionLauncher(tensors, self.betas, self.numbers)

    def _update(self, name: str, gradient: Any, **options: Any) -> None:
        host_step(lion, self.tensors[name], gradient, betas=self.betas, **options)
