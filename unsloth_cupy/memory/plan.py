"""Plans the memory of a training step before anything is allocated.

    plan = plan_memory(config, batch=4, tokens=2048, dtype="bfloat16", recompute_every=2)
    plan.total, plan.at_peak, plan.moments[plan.peak]

The plan runs the training code itself: the model, its tape and the optimizer run on planned arrays,
which have a shape but no elements (``planned.py``), and a ledger records allocations and frees.
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
from ..training.gradients import add_gradients, measure_gradients, sum_gradients, sums_held
from .ledger import GRADIENTS, Ledger, MemoryPlan
from .planned import placed_inputs, recording_in
from .planned_model import (
    DEVICES,
    new_adapter,
    planned_training,
    rehearse,
    segments,
    with_planned_models,
)

if TYPE_CHECKING:
    from ..models.adapters.adapter import Adapter
    from ..models.configs.config import Config
    from .stage_plan import Layout

ALIKE = 2  # forward passes to run: all passes after the first need the same memory
CLIPPED = 0.5  # factor of the gradients; a factor of 1 would skip a copy


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
    offload: bool = False,
    chunked_mlp: bool | None = None,
    adapter: "Adapter | None" = None,
    quantization: str | None = None,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    objective: Callable[..., Any] | None = None,
    device: str = "cuda",
    inputs: Sequence[Mapping[str, Any]] = (),
    merge_into: str | None = None,
    halves: bool = False,
    mtp_weight: float = 0.0,
) -> MemoryPlan:
    """Plan the memory of a training step, op by op, without allocating its arrays.

    Weights are trained as in ``unsloth-cupy finetune``: the optimizer stores them in float32, and
    the model computes with 16-bit copies of the matrices if ``dtype`` has 16 bits.

    Parameters
    ----------
    config : dict
        Content of a Hugging Face config.json, or the ``config`` of a model.
    batch, tokens : int
        Rows per forward pass and tokens per row.
    dtype : dtype or its name
        Dtype of the computation: float16, bfloat16 or float32.
    optimizer : str
        A name in ``models.optimizers.OPTIMIZERS`` (muon trains linear layers, and adamw the
        rest), or "none": only a forward and a backward pass, with weights in ``dtype``.
    state_bits : int
        Bits per value of the optimizer states: 32, or 8 for adamw.
    rank : int, optional
        Train adapters of this LoRA rank on all linear layers, with frozen weights.
    recompute_every : int or CheckpointConfig, optional
        Gradient checkpointing: a CheckpointConfig, or the number of blocks per segment; only the
        input of each segment is saved.  None saves all activations.
    accumulate : int
        Forward passes per step.  ``moments`` of the plan contains at most two passes, since later
        passes need the same memory as the second.
    offload : bool
        Whether the inputs of recomputed segments are stored in the memory of the host; it requires
        ``recompute_every``.
    chunked_mlp : bool, optional
        Whether MLPs and experts are computed in chunks of rows.  None: as in a model, where rows
        exceed a chunk and blocks are recomputed.
    adapter : Adapter, optional
        ``model.adapter``, in place of ``rank``: train this adapter, on the layers that it adapts.
    quantization : str, optional
        Quantization of the linear layers, or of the experts only, as in ``models.quantize``; it
        requires ``rank`` or ``adapter``.
    tensor_parallel, pipeline_parallel : int
        Number of ranks that split each weight, and number of ranks that split the blocks (schedule
        1f1b with ``accumulate`` microbatches).  The result is for the rank with the highest peak.
    objective : callable, optional
        The loss of a step, ``objective(model, tokens=tokens, labels=tokens, count=count)``; the
        default is next-token prediction.  Optional methods of the objective: ``planned(create)``
        returns the same loss with ``create(config)`` in place of other models, so that their
        weights are counted; ``rehearse(model, rows, tokens)`` runs what a step does before its
        forward passes; ``full(batch, tokens)`` returns the arguments to use instead of tokens and
        labels.
    device : str
        "cuda" counts the arrays of kernels, rounded as in CuPy's pool; "cpu" counts NumPy arrays.
    inputs : sequence of {"tokens": array, "labels": array, "offsets": array or None}, optional
        The inputs of the forward passes, as NumPy arrays, instead of ``batch``, ``tokens`` and
        ``accumulate``.  Packed texts and tokens without a label need less memory than full rows.
        The values are read only if ``device`` is "cpu".
    merge_into : str, optional
        Train the adapter through the quantizer of this kind of file, as in ``add_adapter``.  None
        uses the setting of the adapter.
    halves : bool
        Whether gradients are summed as with ``finetune --invariant``: memory then holds a sum for
        each half, ``sum_in_halves``.  ``inputs`` are then the passes to plan, one for each number
        of sums that memory holds, from 0.
    mtp_weight : float
        Weight of the loss of draft heads, as ``model.mtp_weight``; 0: they are stored, not trained.

    Returns
    -------
    plan : MemoryPlan
        Sizes in bytes.

    Raises
    ------
    ConfigError
        The config or an option is invalid.
    ShapeError
        An array would be too large.
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
            raise ConfigError(f"plan_memory: {name}={size}; pass at least 1 and less than 2**31")
    check_choice("plan_memory", "device", device, tuple(DEVICES))
    layout = Layout(tensor_parallel, pipeline_parallel)
    _check_optimizer(optimizer, state_bits, layout)
    parsed = config if isinstance(config, Config) else parse(config)
    _check_adapter(
        parsed, rank, adapter, quantization, objective, merge_into,
        tensor_parallel * pipeline_parallel,
    )  # fmt: skip
    parts = segments("plan_memory", recompute_every, offload=offload, device=device)
    _check_inputs(inputs, layout.ranks, halves=halves)
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
        model, steps = planned_training(*arguments, mtp_weight=mtp_weight)
        model.chunked_mlp = chunked_mlp
        objective = with_planned_models(ledger, objective, arrays, kind)
        ledger.begin()
        most = max(sums_held(accumulate)) + 1 if halves else min(accumulate, ALIKE)
        alike = len(inputs) or most
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

        gradients = (
            _summed(ledger, (own for _, own in passes()), alike)
            if halves
            else sum_gradients(passes(), alike)[1]
        )
        ledger.enter(GRADIENTS, gradients)
        ledger.note("sum of gradients" if accumulate > 1 else "gradients")
        if steps is not None:
            measure = measure_gradients(gradients, 1.0)
            ledger.note("measure_gradients")
            steps.step(gradients, finite=True, factor=CLIPPED)
            del measure
            ledger.note(f"{steps.call}.step")
        return ledger.plan()


def _summed(ledger: Ledger, passes: Iterator[dict[str, Any]], count: int) -> dict[str, Any]:
    """Return the sums of passes; each pass runs with one more sum in memory than the one before."""
    sums = add_gradients({}, next(passes))
    ledger.enter(GRADIENTS, sums)
    return sums if count == 1 else add_gradients(sums, _summed(ledger, passes, count - 1))


def _adapter_of(
    config: "Config", rank: int | None, adapter: "Adapter | None", merge_into: str | None
) -> "Adapter | None":
    """Return the adapter to plan, with the quantizer that it is trained through."""
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
    """Yield the inputs of each pass: ``inputs`` as planned arrays, or full rows."""
    for number in range(count):
        if not inputs:
            rows = arrays.of(sizes, np.int64)
            yield {"tokens": rows, "labels": rows}
        else:
            yield placed_inputs(inputs[number], arrays)


def _check_inputs(inputs: Any, ranks: int, *, halves: bool) -> None:
    """Raise a ConfigError unless ``inputs`` is a list of valid inputs for one rank."""
    listed = isinstance(inputs, list | tuple) and all(isinstance(each, Mapping) for each in inputs)
    if not listed or not all({"tokens", "labels"} <= each.keys() for each in inputs):
        cure = 'pass a list of {"tokens": array, "labels": array, "offsets": array or None}'
        raise ConfigError(f"plan_memory(inputs={reprlib.repr(inputs)}): {cure}")
    if inputs and ranks > 1:
        raise ConfigError(f"plan_memory(inputs=..., {ranks} ranks): inputs need a single rank")
    if halves and ranks > 1:
        problem = f"plan_memory(halves=True, {ranks} ranks): halves need an undivided model"
        raise ConfigError(f"{problem}; leave tensor_parallel and pipeline_parallel out")


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
        raise ConfigError(f"plan_memory({options}): ranks need an optimizer; pass 'adamw'")


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
        cure = "it applies to adapters: pass a rank too, as in rank=16"
        raise ConfigError(f"plan_memory(merge_into={merge_into!r}): {cure}")
    if through and ranks > 1:
        problem = "ranks would split the quantization blocks of the merged file"
        cure = "leave tensor_parallel and pipeline_parallel out"
        raise ConfigError(f"plan_memory(merge_into={merge_into!r}): {problem}; {cure}")
    if quantization is not None and rank is None and adapter is None:
        cure = "quantized weights are frozen: pass a rank too, as in rank=16"
        raise ConfigError(f"plan_memory(quantization={quantization!r}): {cure}")
    if quantization is not None:
        check_stacks("plan_memory", quantization, config)


@contextmanager
def _counted(call: str) -> Iterator[None]:
    """Raise a ConfigError for sizes beyond the integers of kernels, which fit no GPU."""
    try:
        yield
    except OverflowError as error:
        raise ConfigError(f"{call}: {error}; pass smaller sizes") from error
