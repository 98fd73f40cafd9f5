"""A step of AdamW over all parameters of an optimizer in one launch; the host reads nothing.

``adamw.py`` has the formula.  If the averages of a parameter are stored as 8-bit codes, a step is

    mean = decode(codes);  one step;  codes = encode(mean)

and the same for square; see ``dynamic_codes.py``.  Only the device knows whether a step is skipped,
so it counts the steps.
"""

import enum
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ...core.arrays import contiguous
from ...core.dtypes import Array
from ...core.gpu import device_of
from ...core.kernel import load
from ...core.stand_in import representative_steps
from ...placement import synchronize_stream, to_device_of
from ..common import many
from ..common.dynamic_codes import BLOCK, decode, encode, tables
from .adamw import adamw_
from .host import gradient_dtypes
from .launch import Launch, Rates

PART = 1 << 16  # values that the host decodes at a time: they stay in its cache


class Tensor(NamedTuple):
    """A parameter and the other arrays that a step changes."""

    parameter: Any
    copy: Any | None  # the parameter rounded to 16 bits
    mean: Any  # float32, or 8-bit codes
    square: Any
    mean_scale: Any | None  # the scale of each block of codes
    square_scale: Any | None


def host_step(tensor: Tensor, gradient: Array, *, factor: float, **options: Any) -> None:
    """Perform a step of one tensor with NumPy's definition."""
    parameter: Any = tensor.parameter
    if factor != 1 or tensor.copy is not None:
        gradient = gradient.astype(gradient_dtypes(tensor)[1]) * np.float32(factor)
    if tensor.mean_scale is None:
        adamw_(parameter, gradient, tensor.mean, tensor.square, **options)
    else:
        flat = contiguous(parameter).reshape(-1)  # (size,)
        _coded_step(flat, contiguous(gradient).reshape(-1), *tensor[2:], **options)
        if not parameter.flags.c_contiguous:
            parameter[...] = flat.reshape(parameter.shape)
    if tensor.copy is not None:
        with np.errstate(over="ignore"):  # values beyond float16 become infinity, as on a GPU
            tensor.copy[...] = parameter


def _coded_step(
    parameter: Any, gradient: Any, mean: Any, square: Any, *scales: Any, **options: Any
) -> None:
    """Perform a step of one tensor whose averages are codes, part by part."""
    mean, square = mean.reshape(-1), square.reshape(-1)
    for start in representative_steps(parameter, range(0, parameter.size, PART)):
        part = slice(start, start + PART)
        blocks = slice(start // BLOCK, (start + PART) // BLOCK)
        m = decode(mean[part], scales[0][blocks], signed=True)
        s = decode(square[part], scales[1][blocks], signed=False)
        wide = parameter[part].astype(np.float32)
        adamw_.definition(wide, gradient[part].astype(np.float32), m, s, **options)
        parameter[part] = wide
        mean[part], scales[0][blocks] = encode(m, signed=True)
        square[part], scales[1][blocks] = encode(s, signed=False)


class Flags(enum.IntFlag):
    """Flags of a tensor for the kernel: the flags of all launchers, and CODED."""

    COPIED = 4
    WIDE = 8
    CODED = 16  # its averages are codes


class Launcher(Launch):
    """A step in one launch, for tensors that the kernel can process without copies.

    Arrays on the device: ``powers`` has beta1**step, beta2**step, beta1 and beta2 of the next step;
    ``corrections`` the factors of lr and eps in that step; ``counts`` the number of steps.
    """

    flags = Flags

    def __init__(
        self, tensors: Mapping[str, Tensor], betas: tuple[float, float], eps: float, steps: int
    ) -> None:
        super().__init__(tensors)
        self.betas, self.eps = betas, eps
        self.maps = None
        if any(tensor.mean_scale is not None for tensor in tensors.values()):
            self.maps = tables(self.lead)
        # multiplied factor by factor, as in the kernel: a resumed run has equal bits
        power1, power2 = (float(np.cumprod(np.full(steps + 1, beta))[-1]) for beta in self.betas)
        unbiased = np.sqrt(1 - power2)
        powers = np.array([power1, power2, *self.betas])
        corrections = np.array([unbiased / (1 - power1), unbiased], np.float32)
        self.powers, self.corrections = (
            to_device_of(powers, self.lead),
            to_device_of(corrections, self.lead),
        )
        self.counts = to_device_of(np.array([steps, 0], np.uint32), self.lead)
        synchronize_stream(self.lead)  # the first step may run on another stream

    def numbers(self) -> dict[str, float]:
        """Return the number of steps that were not skipped; reading it waits for the device."""
        with device_of(self.counts):
            return {"steps": int(self.counts[0])}

    def kind(self, tensor: Any, gradient: Any) -> int:
        """Return the kind of a tensor for the kernel."""
        return super().kind(tensor, gradient) | Flags.CODED * (tensor.mean_scale is not None)

    def launch(self, table: many.Table, factor: Any, finite: Any, rates: Rates) -> None:
        """Launch the step of all tensors."""
        beta1, beta2 = self.betas
        kernel = load("adamw_step.cu", "adamw_step", self.lead, self.constants(table))
        kernel[table.chunks, many.THREADS](
            table.tensors,
            table.owners,
            self.maps,
            factor,
            finite,
            self.powers,
            self.corrections,
            self.counts,
            beta1,
            1 - beta1,
            beta2,
            1 - beta2,
            rates.lr,
            self.eps,
            1 - rates.lr * rates.weight_decay,
        )
