"""Adam with decoupled weight decay over named parameters."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from . import _arrays
from ._options import is_number
from ._signature import allowed
from ._typing import Array
from .errors import ConfigError, DTypeError, FrameworkError, ShapeError
from .gradients import check_in_place, check_mapping
from .ops.adamw import adamw_


class AdamW:
    """Adam with decoupled weight decay: the formula stands in ``ops/adamw.py``.

    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019.

    Parameters
    ----------
    parameters : {name: array}
        NumPy or CuPy arrays of a float dtype, writable.  The optimizer owns them: each step
        changes them in place.
    lr : float
        Learning rate of a step that is given none.
    betas : (float, float)
        How much of the averages of the gradient and of its square stays at each step.
    eps : float
        Added to the root mean square, in units of the gradient.
    weight_decay : float
        Share of a parameter that is lost per step and unit of lr.
    state_bits : int
        Bits of an element of the averages: 32 (64 for a float64 parameter).

    Raises
    ------
    ConfigError
        An option is out of its range, or a parameter is read-only.
    DTypeError, FrameworkError
        A parameter is no float array of NumPy or CuPy.
    """

    def __init__(
        self,
        parameters: Mapping[str, Array],
        *,
        lr: float = 1e-3,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        state_bits: int = 32,
    ) -> None:
        if state_bits != 32:
            raise ConfigError(f"AdamW: state_bits={state_bits} does not exist; choose 32")
        pair = isinstance(betas, tuple | list) and len(betas) == 2 and all(map(is_number, betas))
        if not pair or not all(0 <= beta < 1 for beta in betas):
            raise ConfigError(f"AdamW: betas={betas}; pass two numbers, each from 0 to below 1")
        for option, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if not is_number(value) or not 0 <= value < math.inf:
                raise ConfigError(f"AdamW: {option}={value}; pass a finite number, 0 or more")
        check_in_place("AdamW", parameters)
        self.parameters = dict(parameters)
        self.lr, self.betas, self.eps, self.weight_decay = (
            lr,
            (betas[0], betas[1]),
            eps,
            weight_decay,
        )
        self.steps = 0
        self.mean, self.square = (
            {name: _zeros(parameter) for name, parameter in parameters.items()} for _ in range(2)
        )

    def step(self, gradients: Mapping[str, Array], lr: float | None = None) -> None:
        """Change every parameter in place, against its gradient.

        Parameters
        ----------
        gradients : {name: array}
            One for every parameter, of its shape and of its dtype or float32.
        lr : float, optional
            Learning rate of this step, from a schedule.

        Raises
        ------
        ConfigError
            A name is missing or unknown, or lr is negative or not finite.
        ShapeError, DTypeError, FrameworkError
            A gradient does not fit its parameter.  Nothing has changed then.
        """
        rate = self.lr if lr is None else lr
        if not is_number(rate) or not 0 <= rate < math.inf:
            raise ConfigError(f"AdamW.step: lr={rate}; pass a finite number, 0 or more")
        check_mapping("AdamW.step", gradients)
        if gradients.keys() != self.parameters.keys():
            missing = sorted(self.parameters.keys() - gradients.keys())
            unknown = sorted(gradients.keys() - self.parameters.keys())
            raise ConfigError(
                f"AdamW.step: missing {missing}, unknown {unknown};"
                " pass one gradient for every parameter, by its name"
            )
        for name, parameter in self.parameters.items():
            _check(f"AdamW.step: gradient of {name}", gradients[name], parameter, "param")
        self.steps += 1
        for name, parameter in self.parameters.items():
            adamw_(
                parameter,
                gradients[name],
                self.mean[name],
                self.square[name],
                lr=rate,
                betas=self.betas,
                eps=self.eps,
                weight_decay=self.weight_decay,
                step=self.steps,
            )

    def state(self) -> dict[str, Array]:
        """Return what a checkpoint keeps beside the parameters: ``load_state`` resumes from it.

        ``steps`` is a NumPy integer array of shape (); ``mean.<name>`` and ``square.<name>`` are
        the optimizer's own arrays, which the next step changes: save or copy them before it.
        """
        return {
            "steps": np.array(self.steps),
            **{f"mean.{name}": mean for name, mean in self.mean.items()},
            **{f"square.{name}": square for name, square in self.square.items()},
        }

    def load_state(self, state: Mapping[str, Array]) -> None:
        """Continue where ``state()`` was taken; later steps have equal bits.

        Raises
        ------
        ConfigError
            A name is missing or unknown, or steps is no integer of 0 or more.
        ShapeError, DTypeError, FrameworkError
            An array does not fit its parameter.  Nothing has changed then.
        """
        check_mapping("AdamW.load_state", state)
        own = self.state()
        steps = np.asarray(state.get("steps"))
        if state.keys() != own.keys() or steps.shape or steps.dtype.kind not in "iu" or steps < 0:
            different = sorted(state.keys() ^ own.keys())
            raise ConfigError(
                f"AdamW.load_state: names differ in {different}, steps is {steps};"
                " pass what state() returned for the same parameters"
            )
        del own["steps"]
        for name, array in own.items():
            _check(f"AdamW.load_state: {name}", state[name], array, "float")
        for name, array in own.items():
            array[...] = state[name]
        self.steps = int(steps)


def _zeros(parameter: Array) -> Array:
    average = _arrays.empty(parameter.shape, allowed("stat", parameter.dtype)[0], parameter)
    average[...] = 0
    return average


def _check(what: str, array: Array, model: Array, kind: str) -> None:
    """Raise unless array has the library and shape of model and a dtype of this kind."""
    library, wanted_library = (_arrays.framework_of(a, what) for a in (array, model))
    if library != wanted_library:
        raise FrameworkError(f"{what} comes from {library}; it must come from {wanted_library}")
    if array.shape != model.shape:
        raise ShapeError(f"{what} has shape {array.shape}; it must be {model.shape}")
    wanted = allowed(kind, model.dtype)
    if array.dtype not in wanted:
        cure = " or ".join(dtype.name for dtype in wanted)
        raise DTypeError(f"{what} is {array.dtype}; it must be {cure}")
