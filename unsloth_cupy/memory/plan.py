"""Plans the memory of a step of training, before anything is allocated.

    plan = plan_memory(config, batch=4, tokens=2048, dtype="bfloat16", recompute_every=2)
    plan.total, plan.at_peak, plan.moments[plan.peak]

The code that trains also plans: the model, its tape and the optimizer run on arrays that have only
a shape (``planned.py``), and a ledger records what they allocate and free.
"""

import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.call import check_options
from ..core.dtypes import KERNEL_DTYPES, float_dtype
from ..errors import ConfigError
from ..ops.common.checks import check_choice
from ..training.checkpoint import CheckpointConfig
from ..training.gradients import measure_gradients, sum_gradients
from .ledger import GRADIENTS, Ledger, MemoryPlan
from .planned import placed_inputs, recording_in
from .planned_model import DEVICES, new_adapter, planned_training, rehearse, with_planned_models

if TYPE_CHECKING:
    from ..models.adapters.adapter import Adapter
    from ..models.configs.config import Config
    from .stage_plan import Layout

ALIKE = 2  # forward passes to run: the first begins the sum of gradients, all others are alike
CLIPPED = 0.5  # the factor of gradients: any but 1, which would save a copy


@check_options
def plan_memory(
    config: "Mapping[str, Any] | Config",
    *,
    batch: int,
    tokens: int,
    dtype: Any,
    optimizer: str = "adamw",
    state_bits: int = 32,
    rank: int | None = None,
    recompute_every: int | CheckpointConfig | None = None,
    accumulate: int = 1,
    chunked_mlp: bool = False,
    adapter: "Adapter | None" = None,
    quantization: str | None = None,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    objective: Callable[..., Any] | None = None,
    device: str = "cuda",
    inputs: Sequence[Mapping[str, Any]] = (),
    merge_into: str | None = None,
) -> MemoryPlan:
    """Return the memory of a step of training, op by op, from a step on shapes alone.

    Weights are trained as ``unsloth-cupy finetune`` trains them: the optimizer owns them in
    float32, and a 16-bit dtype adds copies of the matrices, which the model computes with.

    Parameters
    ----------
    config : dict
        Of a Hugging Face config.json, or the ``config`` of a model.
    batch, tokens : int
        Rows of a forward pass and tokens in a row.
    dtype : dtype or its name
        The dtype of computation: float16, bfloat16 or float32.
    optimizer : str
        A name in ``models.optimizers.OPTIMIZERS`` (muon is for matrices, beside adamw), or none: a
        forward and a backward pass, of weights in dtype.
    state_bits : int
        Of the averages, 32 or, of adamw, 8.
    rank : int, optional
        Of adapters of all linear layers, which are trained in place of the weights.
    recompute_every : int or CheckpointConfig, optional
        Blocks of one part, of which only the input is kept, or a CheckpointConfig; None: all
        activations are kept.
    accumulate : int
        Forward passes whose gradients make one step; ``moments`` has at most two of them, since
        the others need as much as the second.
    chunked_mlp : bool
        Whether ``swiglu_mlp`` computes the MLPs, by chunks of rows.
    adapter : Adapter, optional
        ``model.adapter``, instead of a rank: it is trained on the layers that it has.
    quantization : str, optional
        Of the linear layers, or of the experts alone, as ``models.quantize`` names it; with a
        rank or an adapter.
    tensor_parallel, pipeline_parallel : int
        Ranks that divide each weight, and ranks that divide the blocks (``pipeline_schedule``'s
        1f1b, of accumulate microbatches): the plan of the rank that holds most.
    objective : callable, optional
        The loss of a step, ``objective(model, tokens=tokens, labels=tokens, count=count)``; None:
        that of the next tokens.  If it has ``planned(create)``, that returns the same loss with
        what ``create(config)`` makes: another model, whose weights are counted.  If it has
        ``rehearse(model, rows, tokens)``, that is what a step does before its passes; if it has
        ``full(batch, tokens)``, that returns what it takes in place of tokens and labels.
    device : str
        cuda counts the arrays of kernels, in the pieces of CuPy's pool; cpu those of NumPy.
    inputs : sequence of {"tokens": array, "labels": array, "offsets": array or None}, optional
        What the forward passes of the step will take, in place of batch, tokens and accumulate:
        NumPy arrays, of which a cpu also reads the values.  Packed texts and tokens without a label
        take less memory than full rows.
    merge_into : str, optional
        The kind of file through whose quantizer the adapter is trained, as in ``add_adapter``;
        None: what the adapter itself says.

    Returns
    -------
    plan : MemoryPlan
        In bytes.

    Raises
    ------
    ConfigError
        The config or an option is invalid, or ``swiglu_mlp`` is not the model's MLP.
    ShapeError
        An array cannot have such sizes.
    """
    from ..models.configs.config import Config
    from ..models.objective import next_token
    from ..models.parse import parse
    from ..models.quantizer import Quantizer
    from .stage_plan import Layout, plan_ranks

    kind = float_dtype("plan_memory", dtype, KERNEL_DTYPES)
    sizes = {
        "batch": batch, "tokens": tokens, "accumulate": accumulate,
        "rank": 1 if rank is None else rank,
        "tensor_parallel": tensor_parallel, "pipeline_parallel": pipeline_parallel,
    }  # fmt: skip
    for name, size in sizes.items():
        if not 1 <= size < 2**31:
            raise ConfigError(f"plan_memory: {name}={size}; pass 1 or more, less than 2**31")
    check_choice("plan_memory", "device", device, tuple(DEVICES))
    layout = Layout(tensor_parallel, pipeline_parallel)
    _check_optimizer(optimizer, state_bits, layout)
    parsed = config if isinstance(config, Config) else parse(config)
    _check_adapter(
        parsed, rank, adapter, quantization, objective, merge_into,
        tensor_parallel * pipeline_parallel,
    )  # fmt: skip
    every = recompute_every
    parts = every if isinstance(every, CheckpointConfig | None) else CheckpointConfig(True, every)
    _check_inputs(inputs, layout.ranks)
    if layout.ranks > 1:
        plans = plan_ranks(
            parsed, layout, batch=batch, tokens=tokens, dtype=kind, microbatches=accumulate,
            optimizer=optimizer, state_bits=state_bits, rank=rank, recompute_every=parts,
            chunked_mlp=chunked_mlp, adapter=adapter, quantization=quantization, device=device,
            objective=objective or next_token,
        )  # fmt: skip
        return max(plans, key=lambda plan: plan.total)
    arrays, granule = DEVICES[device]
    ledger = Ledger(granule)
    with recording_in(ledger), ledger.watching_ops(), _counted(f"plan_memory({batch=}, {tokens=})"):
        adapter = _adapter_of(parsed, rank, adapter, merge_into)
        codes = None if quantization is None else Quantizer("plan_memory", quantization)
        arguments = (ledger, parsed, arrays, kind, optimizer, state_bits, adapter, codes)
        model, steps = planned_training(*arguments)
        model.chunked_mlp = chunked_mlp
        objective = with_planned_models(ledger, objective, arrays, kind)
        ledger.begin()
        alike = len(inputs) or min(accumulate, ALIKE)
        if not inputs and hasattr(objective, "full"):
            inputs = [objective.full(batch, tokens)] * alike
        rows = inputs[0]["tokens"].shape if inputs else (batch, tokens)
        rehearse(ledger, objective, model, *rows)
        batches = _batches(arrays, (batch, tokens), alike, inputs)

        def passes() -> Iterator[tuple[Any, dict[str, Any]]]:
            for batch_of_pass in batches:
                loss, gradients = model.value_and_gradients(
                    partial(objective or next_token, **batch_of_pass, count=1),
                    checkpoint=parts,
                    seed=0 if adapter is not None and adapter.dropout else None,
                )
                ledger.enter(GRADIENTS, gradients)
                yield loss, gradients
                del loss, gradients

        _, gradients = sum_gradients(passes(), alike)
        ledger.enter(GRADIENTS, gradients)
        ledger.note("sum of gradients" if accumulate > 1 else "gradients")
        if steps is not None:
            measure = measure_gradients(gradients, 1.0)
            ledger.note("measure_gradients")
            steps.step(gradients, finite=True, factor=CLIPPED)
            del measure
            ledger.note(f"{steps.call}.step")
        return ledger.plan()


def _adapter_of(
    config: "Config", rank: int | None, adapter: "Adapter | None", merge_into: str | None
) -> "Adapter | None":
    """Return the adapter that is planned, with the quantizer through which it is trained."""
    from ..models.adapters.into import Into

    adapter = new_adapter(config, rank) if rank is not None else adapter
    kind = merge_into if adapter is None or adapter.into is None else adapter.into.kind
    if adapter is None or kind is None:
        return adapter
    planned = adapter.holding(adapter.parameters)
    planned.into = Into(f"plan_memory(merge_into={kind!r})", config, kind)
    return planned


def _batches(
    arrays: Any, sizes: tuple[int, int], count: int, inputs: Sequence[Mapping[str, Any]]
) -> Iterator[Mapping[str, Any]]:
    """Yield what each pass takes: inputs, on a GPU without their values, or else full rows."""
    for number in range(count):
        if not inputs:
            rows = arrays.of(sizes, np.int64)
            yield {"tokens": rows, "labels": rows}
        else:
            yield placed_inputs(inputs[number], arrays)


def _check_inputs(inputs: Any, ranks: int) -> None:
    """Raise ConfigError unless inputs are those of the passes of one rank."""
    listed = isinstance(inputs, list | tuple) and all(isinstance(each, Mapping) for each in inputs)
    if not listed or not all({"tokens", "labels"} <= each.keys() for each in inputs):
        cure = 'pass a list of {"tokens": array, "labels": array, "offsets": array or None}'
        raise ConfigError(f"plan_memory(inputs={reprlib.repr(inputs)}): {cure}")
    if inputs and ranks > 1:
        raise ConfigError(f"plan_memory(inputs=..., {ranks} ranks): inputs are those of one rank")


def _check_optimizer(optimizer: str, state_bits: int, layout: "Layout") -> None:
    from ..models.optimizers import OPTIMIZERS, conflict

    check_choice("plan_memory", "optimizer", optimizer, (*OPTIMIZERS, "none"))
    problem = conflict(optimizer, state_bits=state_bits, tensor_parallel=layout.tensor)
    if problem is not None:
        settings, why = problem
        text = ", ".join(f"{name}={value}" for name, value in settings.items())
        cure = f"leave {text} out, or pass optimizer='adamw'"
        raise ConfigError(f"plan_memory({optimizer=}): {why}; {cure}")
    if optimizer == "none" and layout.ranks > 1:
        options = f"optimizer='none', tensor_parallel={layout.tensor}"
        options += f", pipeline_parallel={layout.pipeline}"
        raise ConfigError(f"plan_memory({options}): ranks have an optimizer; pass 'adamw'")


def _check_adapter(
    config: "Config",
    rank: int | None,
    adapter: Any,
    quantization: str | None,
    objective: Any,
    merge_into: str | None,
    ranks: int,
) -> None:
    from ..models.quantizer import check_stacks

    if not (objective is None or callable(objective)):
        problem = f"plan_memory(objective={objective!s:.80})"
        raise ConfigError(f"{problem}: pass a function of a model and a batch, or leave it out")
    if rank is not None and adapter is not None:
        raise ConfigError(f"plan_memory(rank={rank}, adapter=...): leave one of them out")
    if adapter is not None and not hasattr(adapter, "parameters"):
        raise ConfigError(f"plan_memory(adapter={reprlib.repr(adapter)}): pass model.adapter")
    through = merge_into is not None or getattr(adapter, "into", None) is not None
    if merge_into is not None and rank is None and adapter is None:
        cure = "it is of adapters: pass a rank too, as in rank=16"
        raise ConfigError(f"plan_memory(merge_into={merge_into!r}): {cure}")
    if through and ranks > 1:
        problem = "ranks would cut the blocks that a merged file has"
        cure = "leave tensor_parallel and pipeline_parallel out"
        raise ConfigError(f"plan_memory(merge_into={merge_into!r}): {problem}; {cure}")
    if quantization is not None and rank is None and adapter is None:
        cure = "quantized weights are frozen: pass a rank too, as in rank=16"
        raise ConfigError(f"plan_memory(quantization={quantization!r}): {cure}")
    if quantization is not None:
        check_stacks("plan_memory", quantization, config)


@contextmanager
def _counted(call: str) -> Iterator[None]:
    """Raise ConfigError for sizes beyond a kernel's integers: no GPU holds so large an array."""
    try:
        yield
    except OverflowError as error:
        raise ConfigError(f"{call}: {error}; pass smaller sizes") from error
