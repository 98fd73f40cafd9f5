"""Loss scaling, against underflow of float16 gradients: multiply the loss, divide its gradients."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..core.arrays import contiguous, empty
from ..core.call import check_options, is_number
from ..core.dtypes import Array
from ..core.gpu import device_of, several_gpus
from ..core.kernel import load
from ..core.source import Constants
from ..core.target import target_of
from ..errors import ConfigError
from ..ops.common.many import launchable
from ..ops.elements.arithmetic import scale as scaled
from ..ops.elements.arithmetic import scale_by
from ..ops.optimizers.gradients import measured
from ..placement import synchronize_stream, to_device_of, to_numpy
from .gradients import check_floats
from .variable import Var

TINY, HUGE = 2.0**-126, 2.0**126  # normal float32 numbers whose reciprocals are normal too
MOST = 2**32 - 1  # steps that a GPU counts, in a uint32
CONSTANTS = Constants()


class DeviceState(NamedTuple):
    """The state of a scaler in the memory of a GPU."""

    scale: Any  # float64, one element: the divisor of gradients
    factor: Any  # float32 of shape (): the same number, the factor of a loss
    counts: Any  # uint32: good, skipped


def _number(name: str) -> Any:
    """Return a property that reads or sets a number of the state, on the host or on a GPU."""

    def read(self: "LossScaler") -> Any:
        if self.device is not None:  # copy the state to the host, which waits
            (value,) = to_numpy(self.device.scale).tolist()
            good, skipped = to_numpy(self.device.counts).tolist()
            self.numbers = {"value": value, "good": good, "skipped": skipped}
        return self.numbers[name]

    def write(self: "LossScaler", number: Any) -> None:
        read(self)
        self.numbers[name], self.device = number, None

    return property(read, write)


@check_options
class LossScaler:
    """The scale of a loss: it grows while gradients are finite, and shrinks when they overflow.

    ===========  =========================  ==============================  =======
    finite       good steps before          scale after                     good after
    ===========  =========================  ==============================  =======
    yes          less than interval - 1     unchanged                       one more
    yes          interval - 1               min(scale * growth, maximum)    0
    no           any                        max(scale * backoff, minimum)   0
    ===========  =========================  ==============================  =======

    Parameters
    ----------
    scale : float
        The first scale; above 0.
    dynamic : bool
        False: the scale is constant.  Steps that are not finite are still reported and counted.
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
        The scale.  A checkpoint saves ``value``, ``good`` and ``skipped``.  With gradients on a
        GPU, all three are stored on the GPU, and reading one of them waits for it.
    good : int
        Finite steps since the scale last changed.
    skipped : int
        Steps that were not finite.

    Raises
    ------
    ConfigError
        A number is out of range.

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
        self.dynamic = dynamic
        self.growth, self.backoff, self.interval = growth, backoff, interval
        self.minimum, self.maximum = minimum, maximum
        self.numbers = {"value": float(scale), "good": 0, "skipped": 0}
        self.device: DeviceState | None = None

    value = _number("value")
    good = _number("good")
    skipped = _number("skipped")

    def on_device(self, like: Any) -> "DeviceState":
        """Move the state from the host or another GPU to the GPU of ``like``; return the state."""
        if self.device is not None and several_gpus() and self.device.scale.device != like.device:
            self.value = self.value
        if self.device is None:
            value, good, skipped = self.numbers.values()
            self.device = DeviceState(
                to_device_of(np.array([value]), like),
                to_device_of(np.array(value, np.float32), like),
                to_device_of(np.array([good, skipped], np.uint32), like),
            )
            synchronize_stream(like)  # any stream may scale a loss by it
        return self.device

    def scale(self, loss: Any) -> Any:
        """Return ``loss * value``, on the tape of the loss if it has one."""
        array = loss if isinstance(loss, Var) or hasattr(loss, "dtype") else np.asarray(loss)
        value = array.value if isinstance(array, Var) else array
        if target_of(value) is None:
            return scaled(array, factor=self.value)
        return scale_by(array, self.on_device(value).factor)

    def unscale(self, gradients: Mapping[str, Array]) -> tuple[dict[str, Array], Any]:
        """Return ``gradient / value`` by name, and whether all of them are finite.

        Parameters
        ----------
        gradients : {name: array}
            NumPy or CuPy arrays of a float dtype; they are not changed.

        Returns
        -------
        gradients : {name: array}
            float32 for 16-bit gradients: in 16 bits, small values would become 0 again.
        finite : bool, or bool array of shape () on a GPU
            False: skip the step.  The host does not wait for the array.

        Raises
        ------
        DTypeError, FrameworkError
            A gradient is not a float array of NumPy or CuPy.
        """
        check_floats("LossScaler.unscale", gradients)
        with device_of(next(iter(gradients.values()), None)):
            return self._unscaled(gradients)

    def _unscaled(self, gradients: Mapping[str, Array]) -> tuple[dict[str, Array], Any]:
        arrays = [contiguous(gradient) for gradient in gradients.values()]
        if launchable(arrays):
            lead = arrays[0]
            out = [empty(array.shape, np.float32, lead) for array in arrays]
            finite = measured(arrays, divisor=self.on_device(lead).scale, out=out).finite
            return dict(zip(gradients, out, strict=True)), finite
        unscaled = {}
        finite = True
        for name, gradient in gradients.items():
            wide = np.promote_types(gradient.dtype, np.float32)
            unscaled[name] = np.multiply(gradient, 1 / self.value, dtype=wide, casting="same_kind")
            finite = finite & np.isfinite(unscaled[name]).all()
        return unscaled, bool(finite) if isinstance(finite, bool | np.bool_) else finite

    def update(self, finite: Any) -> None:
        """Change the scale after a step, by the table above.

        Parameters
        ----------
        finite : bool, or bool array of shape ()
            An array on a GPU is read only by the GPU: the host does not wait.
        """
        if getattr(finite, "shape", ()) != ():
            raise ConfigError(f"LossScaler.update: finite={finite!r}; pass True or False")
        if self.device is not None and target_of(finite) is not None:
            kernel = load("loss_scaler.cu", "loss_scaler", finite, CONSTANTS)
            kernel[1, 1](
                *self.on_device(finite),
                finite,
                self.growth,
                self.backoff,
                self.minimum,
                self.maximum,
                min(int(self.interval), MOST),
                self.dynamic,
            )
            return
        with device_of(finite):
            good = bool(finite)
        if not good:
            self.skipped += 1
            self.good = 0
            if self.dynamic:
                self.value = max(self.value * self.backoff, self.minimum)
        else:
            self.good += 1
            if self.dynamic and self.good == self.interval:
                self.value, self.good = min(self.value * self.growth, self.maximum), 0


def _check(name: str, value: Any, low: float, high: float) -> None:
    if not is_number(value) or not low <= value <= high:
        raise ConfigError(f"LossScaler({name}={value}): {name} must be in {low} .. {high}")
