"""Schedule-free AdamW over named parameters."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from ..core.call import check_options, is_integer
from ..core.dtypes import Array, allowed
from ..core.gpu import device_of
from ..errors import ConfigError
from ..ops.optimizers.host import host_step
from ..ops.optimizers.schedule_free import (
    ScheduleFreeLauncher,
    Tensor,
    average,
    schedule_free,
    weighted,
)
from .gradients import check_mapping
from .optimizer import Optimizer, check_states, checked_betas

POINT = "point."  # before the name of a parameter, in a state


@check_options
class ScheduleFreeAdamW(Optimizer):
    """Schedule-free AdamW: an average over all steps replaces a learning rate schedule.

    Training may stop at any step.  Gradients are computed at points between a base and the average;
    the parameters are these points.  Inside ``averages`` the parameters are the average, which is
    then evaluated or saved.  The formula is in ``ops/optimizers/schedule_free.py``.
    Source: Defazio et al., The Road Less Scheduled, 2024.

    Parameters
    ----------
    lr : float
        Learning rate after the warm-up; it stays constant.  A good lr is 1 to 10 times AdamW's.
    betas : (float, float)
        Weight of the average in the points, above 0; and decay rate of the second moment.
    eps : float
        Added to the root of the second moment, in units of the gradient.
    warmup : int
        Steps over which the rate grows to lr, also if a step is called with its own rate.

    Other parameters, ``step``, ``state``, 16-bit parameters and errors are as in ``AdamW``.

    Attributes
    ----------
    points : dict of str to array
        Inside ``averages``: the values to which the parameters return.  Outside: empty.
    """

    kind = Tensor
    more = "largest_lr", "weight_sum"

    def __init__(
        self,
        parameters: Mapping[str, Array],
        *,
        lr: float = 2.5e-3,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        warmup: int = 0,
        groups: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self.betas, self.eps = checked_betas("ScheduleFreeAdamW", betas), eps
        if self.betas[0] == 0:
            cure = "pass a first one above 0: it is the weight of the average"
            raise ConfigError(f"ScheduleFreeAdamW: betas={betas}; {cure}")
        if not is_integer(warmup, 0):
            raise ConfigError(f"ScheduleFreeAdamW: warmup={warmup}; pass a whole number, 0 or more")
        self.warmup, self.points = warmup, dict[str, Any]()
        super().__init__(parameters, groups, lr=lr, eps=eps, weight_decay=weight_decay)

    def _tensor(self, name: str, parameter: Any) -> Tensor:
        wide = allowed("stat", parameter.dtype)[0]
        return Tensor(parameter, None, parameter.astype(wide), np.zeros_like(parameter, wide))

    def _launcher(self, tensors: Mapping[str, Any]) -> ScheduleFreeLauncher:
        return ScheduleFreeLauncher(tensors, self.betas, self.eps, self.warmup, self.numbers)

    def _begin(self, rate: float) -> dict[str, Any]:
        step = int(self.numbers["steps"])
        growth, share = weighted(self.numbers, rate, self.warmup)
        own = {"betas": self.betas, "eps": self.eps}
        return {**own, "step": step, "growth": growth, "share": share}

    def _update(self, name: str, gradient: Any, **options: Any) -> None:
        host_step(schedule_free, self.tensors[name], gradient, **options)

    def step(
        self,
        gradients: Mapping[str, Array],
        lr: float | None = None,
        *,
        finite: Any = True,
        factor: Any = 1.0,
    ) -> None:
        """Update every parameter in place; arguments are as in ``AdamW.step``.

        Raises
        ------
        ConfigError
            The call is inside ``averages``.
        ConfigError, ShapeError, DTypeError, FrameworkError
            As in ``AdamW.step``.
        """
        self._check_outside("step")
        super().step(gradients, lr, finite=finite, factor=factor)

    def load_state(self, state: Mapping[str, Array]) -> None:
        """Restore a ``state()``; errors are as in ``AdamW.load_state`` and ``step``.

        If the state was saved inside ``averages``, its points become the parameters.
        """
        self._check_outside("load_state")
        check_mapping(f"{self.call}.load_state", state)
        points = {f"{POINT}{name}": parameter for name, parameter in self.parameters.items()}
        points = points if points.keys() & state.keys() else {}
        check_states(self.call, points, state)
        super().load_state({n: array for n, array in state.items() if n not in points})
        for name in points:
            _write(self.tensors[name.removeprefix(POINT)], state[name])

    def state(self) -> dict[str, Array]:
        """Return a state as ``AdamW.state``; inside ``averages`` it also has ``point.<name>``.

        With such a state, a checkpoint of the averages resumes from the points.
        """
        return super().state() | {f"{POINT}{name}": array for name, array in self.points.items()}

    def averages(self) -> AbstractContextManager[None]:
        """Return a context in which the parameters, and their copies, are the averages.

        ``points`` stores the parameters in the meantime; at the end they are restored bit for bit.
        """
        return _Averages(self)

    def _check_outside(self, call: str) -> None:
        if self.points:
            problem = "the parameters are the averages now"
            raise ConfigError(f"{self.call}.{call}: {problem}; leave the with block before")


class _Averages(AbstractContextManager[None]):
    """The context of ``ScheduleFreeAdamW.averages``; a nested one changes nothing."""

    def __init__(self, optimizer: ScheduleFreeAdamW) -> None:
        self.optimizer, self.leaves = optimizer, False

    def __enter__(self) -> None:
        own = self.optimizer
        if own.points:
            return
        self.leaves = True
        with device_of(own.home):
            for name, tensor in own.tensors.items():
                own.points[name] = tensor.parameter.copy()
                _write(tensor, average(tensor.parameter, tensor.base, beta1=own.betas[0]))

    def __exit__(self, *_: Any) -> None:
        own = self.optimizer
        if self.leaves:
            with device_of(own.home):
                for name, point in own.points.items():
                    _write(own.tensors[name], point)
            own.points = {}


def _write(tensor: Tensor, value: Any) -> None:
    """Write a parameter and its copy."""
    for array in (tensor.parameter, tensor.copy):
        if array is not None:
            with np.errstate(over="ignore"):  # values beyond float16 become inf, as on a GPU
                array[...] = value
