"""Mixed precision: matrices and activations in 16 bits, master weights and statistics in 32.

    masters = model.parameters                            float32
    optimizer, scaler = AdamW(masters), config.scaler()
    copies = compute_copies(masters, config.compute_dtype)
    optimizer.keep_copies(copies)                         every step rewrites them
    model.parameters = masters | copies
    loss, gradients = model.loss_and_gradients(tokens, labels, scaler=scaler)
    norm, finite, factor = measure_gradients(gradients, max_norm, scaler=scaler)
    optimizer.step(gradients, finite=finite, factor=factor)
    scaler.update(finite)

Every op computes in float32 and rounds once, whatever the dtype of its operands.  ``Autocast``
casts operands to the compute dtype, because tensor cores multiply 16-bit values, and half the bytes
move in half the time.  Ops whose result must be precise get float32: probabilities, losses, a
factor per column.  (Micikevicius and others, Mixed Precision Training, 2018.)
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..core.call import check_options
from ..core.dtypes import BFLOAT16, FLOATS, KERNEL_DTYPES, LEADING, Array, Stored
from ..core.op import OPS, Op
from ..errors import ConfigError, DTypeError, naming
from ..ops.elements.cast import cast
from ..placement import on_gpu_of_first
from .checkpoint import CheckpointConfig
from .gradients import check_floats, check_mapping
from .loss_scaler import LossScaler
from .variable import Var

DTYPES = {dtype.name: dtype for dtype in KERNEL_DTYPES}


@check_options
@dataclass(frozen=True)
class MixedPrecisionConfig:
    """The dtypes of computation and of master weights.

    Parameters
    ----------
    compute_dtype : str or dtype
        Dtype of matrices and activations: float16, bfloat16 or float32.
    master_dtype : str or dtype
        Dtype of the weights that the optimizer updates: float32.
    loss_scale : float
        Initial loss scale if compute_dtype is float16.  bfloat16 and float32 have the range of
        gradients, and use no loss scale.
    dynamic_scaling : bool
        Whether the loss scale grows and shrinks: see ``LossScaler``.

    Raises
    ------
    ConfigError
        A dtype has another value, or the loss scale is out of the range of LossScaler.
    """

    compute_dtype: Any = "float16"
    master_dtype: Any = "float32"
    loss_scale: float = 65536.0
    dynamic_scaling: bool = True

    @naming("MixedPrecisionConfig", "LossScaler", scale="loss_scale")
    def __post_init__(self) -> None:
        """Check the arguments; dtypes become their names."""
        for name, known in (("compute_dtype", [*DTYPES]), ("master_dtype", ["float32"])):
            value = getattr(self, name)
            try:
                named = isinstance(value, str) and value == "bfloat16"
                known_kind = isinstance(
                    value, str | np.dtype | type
                )  # no other objects with a dtype
                dtype = BFLOAT16 if named else np.dtype(value if known_kind else object)
            except (TypeError, ValueError):
                dtype = np.dtype(object)
            if dtype.name not in known:
                call = f"MixedPrecisionConfig({name}={value!r})"
                raise ConfigError(f"{call}: choose from {', '.join(known)}")
            object.__setattr__(self, name, dtype.name)
        dynamic: Any = self.dynamic_scaling
        if not isinstance(dynamic, bool):
            raise ConfigError(f"MixedPrecisionConfig(dynamic_scaling={dynamic!r}): pass a bool")
        LossScaler(self.loss_scale)

    def scaler(self) -> LossScaler:
        """Return a new loss scaler; its scale is always 1 unless the compute dtype is float16."""
        if self.compute_dtype == "float16":
            return LossScaler(self.loss_scale, dynamic=self.dynamic_scaling)
        return LossScaler(1.0, dynamic=False)


@check_options
@dataclass(frozen=True)
class TrainingConfig:
    """Batch size, precision and gradient checkpointing of a training step.

    Parameters
    ----------
    batch_size : int
        Rows per forward pass.
    max_seq_len : int
        Maximum number of tokens per row.
    gradient_accumulation_steps : int
        Forward passes whose gradients are summed in an optimizer step.
    mixed_precision : MixedPrecisionConfig
        Dtypes and loss scale.
    checkpoint : CheckpointConfig
        Which layers the backward pass recomputes.

    Raises
    ------
    ConfigError
        A number is below 1.
    """

    batch_size: int = 4
    max_seq_len: int = 2048
    gradient_accumulation_steps: int = 4
    mixed_precision: MixedPrecisionConfig = field(default_factory=MixedPrecisionConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("batch_size", "max_seq_len", "gradient_accumulation_steps"):
            number = getattr(self, name)
            if not 1 <= number < 2**31:
                cure = "pass an integer, 1 or more, less than 2**31"
                raise ConfigError(f"TrainingConfig({name}={number!r}): {cure}")
        for name, kind in (
            ("mixed_precision", MixedPrecisionConfig),
            ("checkpoint", CheckpointConfig),
        ):
            if not isinstance(getattr(self, name), kind):
                call = f"TrainingConfig({name}={getattr(self, name)!r})"
                raise ConfigError(f"{call}: pass a {kind.__name__}")

    @property
    def tokens_per_step(self) -> int:
        """The maximum number of tokens per optimizer step."""
        return self.batch_size * self.max_seq_len * self.gradient_accumulation_steps


class Autocast:
    """Calls ops with operands cast to suitable dtypes: ``y = cast(linear, x, weight)``.

    Norm weights, biases, tables and statistics (operands of the kinds param, table and stat) are
    not cast, whatever their dtype.

    Parameters
    ----------
    dtype : str or dtype
        The compute dtype.

    Raises
    ------
    ConfigError
        The dtype is not float16, bfloat16 or float32.
    """

    @naming("Autocast", "MixedPrecisionConfig", compute_dtype="dtype")
    def __init__(self, dtype: Any) -> None:
        self.dtype = DTYPES[MixedPrecisionConfig(dtype).compute_dtype]

    def __call__(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call an op, or a public function named as one, on arrays or on a tape.

        Raises
        ------
        ConfigError
            The function is not an op, or it is an op that changes or casts its arguments.
        """
        name, known = getattr(function, "__name__", repr(function)), autocast_ops()
        op = known.get(name.removesuffix("_forward"))
        if op is None:
            raise ConfigError(f"Autocast: {name} is not an op; choose from {', '.join(known)}")
        kinds = {operand.name: operand.kind for operand in op.contract.inputs}
        dtype = DTYPES.get(op.facts.get("autocast", ""), self.dtype)
        bound = inspect.signature(function).bind(*args, **options)
        for key, value in bound.arguments.items():
            bound.arguments[key] = _fit(value, kinds.get(key), dtype)
        return function(*bound.args, **bound.kwargs)


def autocast_ops() -> dict[str, Op[..., Any]]:
    """Return the ops that ``Autocast`` calls, by public name: no backward ops, casts or ``op_``."""
    backward = {op.backward for op in OPS.values()}
    return {
        name.removesuffix("_forward"): op
        for name, op in sorted(OPS.items())
        if op not in backward and not name.endswith(("_", "_gradients")) and "cast_to_" not in name
    }


def _fit(value: Any, kind: str | None, dtype: Any) -> Any:
    array = value.value if isinstance(value, Var) else value
    fits = kind in LEADING and not isinstance(array, Stored)
    return cast(value, dtype) if fits and getattr(array, "dtype", None) in KERNEL_DTYPES else value


@naming("compute_copies", "MixedPrecisionConfig", compute_dtype="dtype")
@on_gpu_of_first
def compute_copies(parameters: Mapping[str, Array], dtype: Any) -> dict[str, Array]:
    """Return 16-bit copies of float32 parameters, by name, with which a model computes.

    Arrays of two axes or more are rounded to the dtype.  Norm weights, biases and quantized weights
    have no copies.

    Raises
    ------
    ConfigError
        The dtype is not float16, bfloat16 or float32 (which needs no copies: the result is empty).
    DTypeError, FrameworkError
        A parameter is not a float32 array of NumPy or CuPy.
    """
    copy_dtype = DTYPES[MixedPrecisionConfig(dtype).compute_dtype]
    check_mapping("compute_copies", parameters)
    parameters = {n: array for n, array in parameters.items() if not isinstance(array, Stored)}
    check_floats("compute_copies", parameters)
    for name, array in parameters.items():
        if array.dtype != FLOATS[2]:
            raise DTypeError(f"compute_copies: {name} is {array.dtype}; masters must be float32")
    if copy_dtype == FLOATS[2]:
        return {}
    with np.errstate(over="ignore"):  # float16 overflow gives inf, as on a GPU
        return {n: array.astype(copy_dtype) for n, array in parameters.items() if array.ndim > 1}
