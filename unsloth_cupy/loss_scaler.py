"""Keeping small float16 gradients above zero: the loss is scaled up, its gradients down again."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ._options import is_number
from ._typing import Array
from .errors import ConfigError
from .gradients import check_floats
from .ops.arithmetic import scale as scaled
from .tape import Var

TINY, HUGE = 2.0**-126, 2.0**127  # float32's normal numbers


class LossScaler:
    """A scale for the loss that grows while gradients stay finite and shrinks when they do not.

    ===========  =========================  ==============================  =======
    finite       good steps before          scale after                     good after
    ===========  =========================  ==============================  =======
    yes          less than interval - 1     the same                        one more
    yes          interval - 1               min(scale * growth, maximum)    0
    no           any                        max(scale * backoff, minimum)   0
    ===========  =========================  ==============================  =======

    Parameters
    ----------
    scale : float
        The first scale; above 0.
    dynamic : bool
        False keeps the scale as it is; steps that are not finite are still told and counted.
    growth : float
        Factor after ``interval`` good steps in a row; 1 or more.
    backoff : float
        Factor after a step that is not finite; above 0, at most 1.
    interval : int
        Good steps between two growths; 1 or more.
    minimum, maximum : float
        Bounds of the scale.

    Attributes
    ----------
    value : float
        The scale.  With ``good`` and ``skipped``, all that a checkpoint needs to keep.
    good : int
        Finite steps since the scale last changed.
    skipped : int
        Steps that were not finite.

    Raises
    ------
    ConfigError
        A number is out of its range.

    Notes
    -----
    Source: Micikevicius and others, Mixed Precision Training, 2018.
    """

    def __init__(
        self,
        scale: float = 65536.0,
        *,
        dynamic: bool = True,
        growth: float = 2.0,
        backoff: float = 0.5,
        interval: int = 2000,
        minimum: float = 1.0,
        maximum: float = 2.0**31,
    ) -> None:
        _check("minimum", minimum, TINY, HUGE)
        _check("maximum", maximum, minimum, HUGE)
        _check("scale", scale, minimum, maximum)
        _check("growth", growth, 1, HUGE)
        _check("backoff", backoff, TINY, 1)
        _check("interval", interval, 1, HUGE)
        self.value, self.dynamic = float(scale), dynamic
        self.growth, self.backoff, self.interval = growth, backoff, interval
        self.minimum, self.maximum = minimum, maximum
        self.good = self.skipped = 0

    def scale(self, loss: Any) -> Any:
        """Return ``loss * value``, on the tape where loss is on one."""
        array = loss if isinstance(loss, Var) or hasattr(loss, "dtype") else np.asarray(loss)
        return scaled(array, factor=self.value)

    def unscale(self, gradients: Mapping[str, Array]) -> tuple[dict[str, Array], bool]:
        """Return ``gradient / value`` by name, and whether all of them are finite.

        Parameters
        ----------
        gradients : {name: array}
            NumPy or CuPy arrays of a float dtype; they stay as they are.

        Returns
        -------
        gradients : {name: array}
            float32 where they were of 16 bits: a smaller dtype would lose what scaling saved.
        finite : bool
            False: skip the step.

        Raises
        ------
        DTypeError, FrameworkError
            A gradient is no float array of NumPy or CuPy.
        """
        check_floats("LossScaler.unscale", gradients)
        found = {}
        finite: Any = True
        for name, gradient in gradients.items():
            wide = np.promote_types(gradient.dtype, np.float32)
            found[name] = np.multiply(gradient, 1 / self.value, dtype=wide, casting="same_kind")
            finite = finite & np.isfinite(found[name]).all()
        return found, bool(finite)

    def update(self, finite: bool) -> None:
        """Let the scale grow or shrink after a step, as the table above says."""
        if not finite:
            self.skipped += 1
            self.good = 0
            if self.dynamic:
                self.value = max(self.value * self.backoff, self.minimum)
            return
        self.good += 1
        if self.dynamic and self.good == self.interval:
            self.value, self.good = min(self.value * self.growth, self.maximum), 0


def _check(name: str, value: Any, low: float, high: float) -> None:
    if not is_number(value) or not low <= value <= high:
        raise ConfigError(f"LossScaler({name}={value}): {name} must be in {low} .. {high}")
