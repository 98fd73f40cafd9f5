"""The memory of a step of training, before any is spent.

    plan = plan_memory(config, batch=4, tokens=2048, dtype="bfloat16", checkpoint_every=2)
    plan.total, plan.at_peak, plan.moments[plan.peak]

What trains also plans: the model, its tape and the optimizer run on arrays that are shapes alone
(``planned.py``), and a ledger enters what they take and let go of.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.call import checked
from ..core.dtypes import FLOAT32, KERNEL_DTYPES, float_dtype
from ..errors import ConfigError
from ..training.checkpoint import CheckpointConfig
from ..training.gradients import measure_gradients, sum_gradients
from ..training.optimizer import AdamW
from ..training.precision import compute_copies
from .ledger import GRADIENTS, MASTER, OPTIMIZER, WEIGHTS, Ledger, MemoryPlan
from .planned import Planned, PlannedOnHost, keeping

if TYPE_CHECKING:
    from ..models import Transformer
    from ..models.adapter import Adapter
    from ..models.config import Config

OPTIMIZERS = ("adamw", "none")
# arrays of each, and the bytes that its allocator rounds to: CuPy's pool has pieces of 512
DEVICES: Mapping[str, tuple[Any, int]] = {"cuda": (Planned, 512), "cpu": (PlannedOnHost, 1)}
ALIKE = 2  # forward passes of a step: the first begins a sum, all others add to it
CLIPPED = 0.5  # the factor of gradients: any but 1, which would spare a copy


@checked
def plan_memory(
    config: "Mapping[str, Any] | Config",
    *,
    batch: int,
    tokens: int,
    dtype: Any,
    optimizer: str = "adamw",
    state_bits: int = 32,
    rank: int | None = None,
    checkpoint_every: int | CheckpointConfig | None = None,
    accumulate: int = 1,
    chunked_mlp: bool = False,
    adapter: "Adapter | None" = None,
    quantization: str | None = None,
    device: str = "cuda",
) -> MemoryPlan:
    """Return what a step of training holds, op by op, from a step on shapes alone.

    Weights are trained as ``unsloth-cupy finetune`` trains them: the optimizer owns them in
    float32, and a 16-bit dtype adds copies of the matrices, which the model computes with.

    Parameters
    ----------
    config : dict
        Of a Hugging Face config.json, or the ``config`` of a model.
    batch, tokens : int
        Rows of a forward pass and tokens in a row.
    dtype : dtype or its name
        Of what is computed: float16, bfloat16 or float32.
    optimizer : str
        adamw, or none: a forward and a backward pass, of weights in dtype.
    state_bits : int
        Of the optimizer's averages, 32 or 8.
    rank : int, optional
        Of adapters of all linear layers, which are trained in place of the weights.
    checkpoint_every : int or CheckpointConfig, optional
        How many blocks make a part whose input alone is kept, or a CheckpointConfig; None: all is
        kept.
    accumulate : int
        Forward passes whose gradients make one step; ``moments`` has two of them at the most, since
        the others take what the second takes.
    chunked_mlp : bool
        Whether ``swiglu_mlp`` computes the MLPs, by chunks of rows.
    adapter : Adapter, optional
        ``model.adapter``, in place of a rank: trained as it is, on the layers that it has.
    quantization : str, optional
        Of the linear layers, as ``models.quantize`` names it; with a rank or an adapter.
    device : str
        cuda counts what kernels take, in the pieces of CuPy's pool; cpu what NumPy allocates.

    Returns
    -------
    plan : MemoryPlan
        In bytes.

    Raises
    ------
    ConfigError
        The config or an option makes no sense, or ``swiglu_mlp`` is not the model's MLP.
    ShapeError
        No array takes such sizes.
    """
    from ..models.config import Config
    from ..models.parse import parse
    from ..models.quantized import Quantizer

    kind = float_dtype("plan_memory", dtype, KERNEL_DTYPES)
    sizes = {"batch": batch, "tokens": tokens, "accumulate": accumulate}
    sizes |= {} if rank is None else {"rank": rank}
    for name, size in sizes.items():
        if not 1 <= size < 2**31:
            raise ConfigError(f"plan_memory: {name}={size}; pass 1 or more, less than 2**31")
    for name, value, known in (
        ("optimizer", optimizer, OPTIMIZERS),
        ("device", device, tuple(DEVICES)),
    ):
        if value not in known:
            raise ConfigError(f"plan_memory: {name}={value!r}; choose from {', '.join(known)}")
    if rank is not None and adapter is not None:
        raise ConfigError(f"plan_memory(rank={rank}, adapter=...): leave one of them out")
    if quantization is not None and rank is None and adapter is None:
        cure = "quantized weights are frozen: pass a rank too, as in rank=16"
        raise ConfigError(f"plan_memory(quantization={quantization!r}): {cure}")
    parsed = config if isinstance(config, Config) else parse(config)
    parts = checkpoint_every
    if parts is not None and not isinstance(parts, CheckpointConfig):
        parts = CheckpointConfig(True, parts)
    alike = min(accumulate, ALIKE)
    arrays, granule = DEVICES[device]
    ledger = Ledger(granule)
    with keeping(ledger), ledger.watching_ops(), _counted(f"plan_memory({batch=}, {tokens=})"):
        given = new_adapter(parsed, rank) if rank is not None else adapter
        codes = None if quantization is None else Quantizer("plan_memory", quantization)
        given_to = (ledger, parsed, arrays, kind, optimizer, state_bits, given, codes)
        model, steps = trained(*given_to)
        model.chunked_mlp = chunked_mlp
        ledger.begin()

        def passes() -> Iterator[tuple[Any, dict[str, Any]]]:
            for _ in range(alike):
                rows = arrays.of((batch, tokens), np.int64)
                loss, gradients = model.loss_and_gradients(rows, rows, checkpoint=parts)
                ledger.enter(GRADIENTS, gradients)
                yield loss, gradients
                del loss, gradients

        _, gradients = sum_gradients(passes(), alike)
        ledger.enter(GRADIENTS, gradients)
        ledger.note("sum of gradients" if accumulate > 1 else "gradients")
        if steps is not None:
            found = measure_gradients(gradients, 1.0)
            ledger.note("measure_gradients")
            steps.step(gradients, finite=True, factor=CLIPPED)
            del found
            ledger.note("AdamW.step")
        return ledger.plan()


@contextmanager
def _counted(call: str) -> Iterator[None]:
    """Name a count that a kernel's integers do not hold: no GPU has so large an array."""
    try:
        yield
    except OverflowError as error:
        raise ConfigError(f"{call}: {error}; pass smaller sizes") from error


def new_adapter(config: "Config", rank: int) -> "Adapter":
    """Return adapters of all linear layers, outside of the plan."""
    from ..models.adapter import DOWN, PREFIX, UP, Adapter, linear_layers

    parameters = {}
    with keeping(Ledger(1)):
        for name, (outputs, inputs) in linear_layers(config).items():
            parameters[f"{PREFIX}{name}.{DOWN}"] = Planned.of((rank, inputs), FLOAT32)
            parameters[f"{PREFIX}{name}.{UP}"] = Planned.of((outputs, rank), FLOAT32)
    return Adapter({"r": rank}, parameters)


def trained(
    ledger: "Ledger",
    config: "Config",
    arrays: Any,
    kind: Any,
    optimizer: str,
    state_bits: int,
    adapter: "Adapter | None",
    codes: Callable[[str, Any], Any] | None,
    shapes: Mapping[str, Any] | None = None,
    ranks: Any = None,
) -> "tuple[Transformer, AdamW | None]":
    """Return a model as it is before a step, and its optimizer; shapes are those of a part.

    Where there are ranks, they divide the parameters by Zero3.
    """
    from ..models.adapter import Adapter
    from ..models.transformer import Transformer
    from ..parallel.zero3 import Zero3

    def made(shapes: Mapping[str, Any], *, narrow: bool, all_axes: bool = False) -> dict[str, Any]:
        return {
            name: arrays.of(shape, kind if narrow and (all_axes or len(shape) > 1) else FLOAT32)
            for name, shape in shapes.items()
        }

    learns_all = adapter is None and optimizer != "none"
    of_all = config.shapes() if shapes is None else shapes
    parameters = made(of_all, narrow=not learns_all, all_axes=optimizer == "none")
    if codes is not None:
        for name in parameters:
            parameters[name] = codes(name, parameters[name])
    model = Transformer(config, parameters, {})
    parts = None if ranks is None else Zero3(model, ranks)
    parameters = model.parameters
    ledger.enter(WEIGHTS, parameters)
    if adapter is not None:
        shapes = {name: array.shape for name, array in adapter.parameters.items()}
        model.adapter = Adapter(adapter.settings, made(shapes, narrow=False))
        ledger.enter(WEIGHTS, model.adapter.parameters)
    if optimizer == "none":
        return model, None
    steps = AdamW(model.trainable, state_bits=state_bits)
    ledger.enter(OPTIMIZER, steps.state())
    if learns_all:
        copies = (
            compute_copies(parameters, kind.name)
            if parts is None
            else parts.compute_copies(kind.name)
        )
        ledger.enter(MASTER, {name: parameters[name] for name in copies})
        ledger.enter(WEIGHTS, copies)
        steps.keep_copies(copies)
        model.parameters = parameters | copies
    return model, steps
