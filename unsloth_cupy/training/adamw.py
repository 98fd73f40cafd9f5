"""Adam with decoupled weight decay over named parameters."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from ..core.call import check_options
from ..core.dtypes import FLOATS, Array, allowed
from ..errors import ConfigError, DTypeError
from ..ops.common.dynamic_codes import BLOCK
from ..ops.optimizers.adamw_step import Launcher, Tensor, host_step
from .averages import own_form
from .gradients import check_mapping
from .optimizer import Optimizer, checked_betas, matching

SMALL = 4096  # elements; smaller parameters have float32 moments, as in bitsandbytes


@check_options
class AdamW(Optimizer):
    """Adam with decoupled weight decay; the formula is in ``ops/optimizers/adamw.py``.

    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019.

    Parameters
    ----------
    parameters : {name: array}
        Writable NumPy or CuPy arrays of a float dtype.  The optimizer owns them: each step changes
        them in place.
    lr : float
        Learning rate for calls of ``step`` without ``lr``.
    betas : (float, float)
        Decay rates of the first and the second moment.
    eps : float
        Added to the square root of the second moment, in units of the gradient.
    weight_decay : float
        Decoupled weight decay: a step multiplies a parameter by 1 - lr * weight_decay.
    state_bits : int
        Bits per element of the moments: 32 (64 for a float64 parameter), or 8: codes with a
        float32 scale per 256 elements, for parameters of 4096 elements or more.
    whole : collection of str
        Names or patterns, as in groups, of parameters whose moments stay in 32 bits if
        ``state_bits`` is 8.  Intended for embeddings and heads, whose rows have gradients of very
        different sizes.
    groups : sequence of {"names": ..., "lr": ..., "weight_decay": ...}, optional
        Groups of parameters with their own ``lr`` or ``weight_decay``: ``names`` is a name, a
        pattern such as ``"*norm*"``, or a list of names and patterns.  Parameters outside the
        groups use the options above.  If ``step`` is called with another ``lr``, the rates of
        groups are scaled by the same factor.

    Raises
    ------
    ConfigError
        An option is out of range, or a parameter is read-only; a group has an unknown key, contains
        no parameter, or contains a parameter that is also in another group; a name in ``whole``
        matches no parameter.
    DTypeError, FrameworkError
        A parameter is not a float array of NumPy or CuPy, or is float64 with 8-bit moments; or
        parameters are on several GPUs.

    Notes
    -----
    On a GPU a step launches one kernel per group if all parameters are contiguous and have 32 or 16
    bits.  The host does not wait for a step to finish, but reading ``steps`` does.  Codes and
    scales have the format of bitsandbytes' state1, absmax1, state2 and absmax2.  Second moments
    below 1e-4 of their scale are rounded up, so that a value above 0 never becomes 0; bitsandbytes
    rounds to nearest.
    """

    kind = Tensor

    def __init__(
        self,
        parameters: Mapping[str, Array],
        *,
        lr: float = 1e-3,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        state_bits: int = 32,
        whole: Collection[str] = (),
        groups: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        if state_bits not in (8, 32):
            raise ConfigError(f"AdamW: state_bits={state_bits} does not exist; choose 32 or 8")
        self.betas, self.eps, self.bits = checked_betas("AdamW", betas), eps, state_bits
        check_mapping("AdamW", parameters)
        self.whole = matching(f"AdamW(whole={whole!s:.80})", whole, parameters)
        super().__init__(parameters, groups, lr=lr, eps=eps, weight_decay=weight_decay)

    def _tensor(self, name: str, parameter: Any) -> Tensor:
        wide = allowed("stat", parameter.dtype)[0]
        if self.bits == 32 or parameter.size < SMALL or name in self.whole:
            mean, square = (np.zeros_like(parameter, wide) for _ in range(2))
            return Tensor(parameter, None, mean, square, None, None)
        if wide != FLOATS[2]:
            problem = f"AdamW: {name} is {parameter.dtype}"
            raise DTypeError(f"{problem}; 8-bit moments need a parameter of 32 or 16 bits")
        mean, square = (np.zeros_like(parameter, np.uint8, order="C") for _ in range(2))
        blocks = -(-parameter.size // BLOCK)
        scales = (np.zeros_like(parameter, np.float32, shape=(blocks,)) for _ in range(2))
        return Tensor(parameter, None, mean, square, *scales)

    def load_state(self, state: Mapping[str, Array]) -> None:
        """Restore a ``state()``; 8-bit codes are also read into moments of 32 bits.

        Second moments that earlier versions rounded to 0 become the smallest code above 0.
        """
        check_mapping("AdamW.load_state", state)
        narrow = {name for name, t in self.tensors.items() if t.mean_scale is not None}
        shapes = {name: parameter.shape for name, parameter in self.parameters.items()}
        super().load_state(own_form(state, shapes, narrow))

    def _launcher(self, tensors: Mapping[str, Any]) -> Launcher:
        return Launcher(tensors, self.betas, self.eps, int(self.numbers["steps"]))

    def _begin(self, rate: float) -> dict[str, Any]:
        return {"eps": self.eps, "betas": self.betas, "step": int(self.numbers["steps"])}

    def _update(self, name: str, gradient: Any, **options: Any) -> None:
        host_step(self.tensors[name], gradient, **options)
