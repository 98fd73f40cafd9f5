"""A step of AdamW over all parameters of an optimizer: one launch, and no word from the host.

The formula stands in ``ops/adamw.py``; with codes of 8 bits for a parameter's averages, it is

    mean = decode(codes);  one step;  codes = encode(mean)

and the same for square; ``dynamic_codes.py`` has both.  Whether a step is skipped, and so how
many there have been, is known on the device alone.
"""

import enum
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...core.arrays import packed
from ...core.dtypes import KERNEL_DTYPES, Array, allowed
from ...core.gpu import at
from ...core.kernel import load
from ...placement import full_like, placed, settle, stream
from ..common import many
from ..common.dynamic_codes import BLOCK, decode, encode, tables
from ..common.steps import representative_steps
from .adamw import adamw_

PART = 1 << 16  # values decoded at a time on the host: they stay in its cache
KEPT_TABLES = 8  # of streams and gradients' addresses, which seldom change


class Tensor(NamedTuple):
    """One parameter and all that a step changes beside it."""

    parameter: Any
    copy: Any | None  # the parameter again, rounded to 16 bits
    mean: Any  # float32, or codes
    square: Any
    mean_scale: Any | None  # of codes, by blocks
    square_scale: Any | None

    @property
    def dtypes(self) -> tuple[Any, Any]:
        """What a gradient may be: of the dtype that a model computes in, or float32."""
        model = self.parameter if self.copy is None else self.copy
        return model.dtype, allowed("param", model.dtype)[-1]


def host_step(tensor: Tensor, gradient: Array, *, factor: float, **options: Any) -> None:
    """Make a step of one tensor by its definition."""
    parameter: Any = tensor.parameter
    if factor != 1 or tensor.copy is not None:
        gradient = gradient.astype(tensor.dtypes[1]) * np.float32(factor)
    if tensor.mean_scale is None:
        adamw_(parameter, gradient, tensor.mean, tensor.square, **options)
    else:
        flat = packed(parameter).reshape(-1)
        _coded_step(flat, packed(gradient).reshape(-1), *tensor[2:], **options)
        if not parameter.flags.c_contiguous:
            parameter[...] = flat.reshape(parameter.shape)
    if tensor.copy is not None:
        with np.errstate(over="ignore"):  # what float16 cannot hold is inf, as on a GPU
            tensor.copy[...] = parameter


def _coded_step(
    parameter: Any, gradient: Any, mean: Any, square: Any, *scales: Any, **options: Any
) -> None:
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


class Launcher:
    """The step as one launch, for tensors that kernels may take as they lie.

    ``powers`` has beta1**step, beta2**step, beta1 and beta2 of the next step, ``corrections`` what
    rate and eps are multiplied by in it, ``counts`` the steps that are done.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], betas: tuple[float, float], steps: int
    ) -> None:
        self.tensors, self.betas = tensors, betas
        self.lead = next(iter(tensors.values())).parameter
        self.tables: dict[Any, many.Table] = {}
        self.maps = None
        if any(tensor.mean_scale is not None for tensor in tensors.values()):
            self.maps = tables(self.lead)
        # a product of factors, as the kernel forms it: a resumed run has the bits of another
        power1, power2 = (float(np.cumprod(np.full(steps + 1, beta))[-1]) for beta in self.betas)
        unbiased = np.sqrt(1 - power2)
        powers = np.array([power1, power2, *self.betas])
        corrections = np.array([unbiased / (1 - power1), unbiased], np.float32)
        self.powers, self.corrections = placed(powers, self.lead), placed(corrections, self.lead)
        self.counts = placed(np.array([steps, 0], np.uint32), self.lead)
        settle(self.lead)  # any stream may make the first step

    @property
    def steps(self) -> int:
        """How many steps were not skipped; reading it waits for the device."""
        with at(self.counts):
            return int(self.counts[0])

    def __call__(
        self,
        gradients: Sequence[Array],
        *,
        lr: float,
        eps: float,
        weight_decay: float,
        finite: Any,
        factor: Any,
    ) -> None:
        """Update all tensors, or none where ``finite`` is or holds False."""
        if isinstance(finite, bool | np.bool_):
            if not finite:
                return
            finite = None
        if isinstance(factor, float | int | np.generic):
            factor = None if factor == 1 else full_like(self.corrections[0], float(factor))
        gradients = [packed(gradient) for gradient in gradients]
        table = self._table(gradients)
        beta1, beta2 = self.betas
        chosen = table.constants(**Kind.__members__)
        kernel = load("adamw_step.cu", "adamw_step", self.lead, chosen)
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
            lr,
            eps,
            1 - lr * weight_decay,
        )

    def _table(self, gradients: Sequence[Any]) -> many.Table:
        key = stream(self.lead), *((many.address(g), g.dtype) for g in gradients)
        table = self.tables.get(key)
        if table is None:
            if len(self.tables) >= KEPT_TABLES:
                self.tables.clear()
            tensors = self.tensors.values()
            arrays = zip(*tensors, strict=True)
            columns: dict[str, Any] = dict(zip(Tensor._fields, arrays, strict=True))
            columns["gradient"] = gradients
            kinds = map(_kind, tensors, gradients)
            table = self.tables[key] = many.table(columns, [*kinds])
        return table


class Kind(enum.IntFlag):
    """What a kernel knows of a tensor beside its dtype, whose number is in the bits below."""

    COPIED = 4
    WIDE = 8
    CODED = 16


def _kind(tensor: Tensor, gradient: Any) -> int:
    model = tensor.dtypes[0]
    copied, coded = tensor.copy is not None, tensor.mean_scale is not None
    flags = Kind.COPIED * copied | Kind.WIDE * (gradient.dtype != model) | Kind.CODED * coded
    return KERNEL_DTYPES.index(model) | flags
