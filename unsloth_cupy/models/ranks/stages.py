"""Pipeline parallelism: forward and backward of the blocks of one rank."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...core.dtypes import Array
from ...errors import ConfigError
from ...ops.elements.arithmetic import add
from ...ops.elements.cast import accumulate_, cast
from ...parallel.pipeline import receive, run_pipeline, send
from ...parallel.schedule import Schedule, Step, consumer, pipeline_schedule, producer
from ...parallel.taped import taped, value_of
from ...training.checkpoint import CheckpointConfig
from ...training.tape import Tape
from ...training.variable import Var
from ..adapters.adapter import PREFIX
from ..layers.block import blocks, embedded
from ..layers.call import Call
from ..layers.context import Context, own_tokens, real_tokens
from ..layers.experts_layer import Routed, router_sums
from ..layers.norms import join
from ..objective import Objective, Reached, TrainingStep, next_token, start_of_backward
from .pipeline_stages import EMBEDDING, Stages

if TYPE_CHECKING:
    from ..network import Network


class _Saved(NamedTuple):
    """Results of a forward step that its backward step needs."""

    tape: Tape
    xs: tuple[Var, ...]  # inputs from the previous stage
    ys: tuple[Any, ...]  # the loss, or the outputs for the next stage
    watched: Mapping[str, Var]
    dy: Array | None  # upstream gradient of the loss; None before the last block


class ModelStage:
    """The ``Stage`` of ``run_pipeline``: one training step of this rank's blocks.

    A microbatch contains the arguments of the objective by name, including ``tokens``.  Stages send
    hidden states to the next stage, and with a router's loss also the ``sums_of_balance`` so far;
    the gradients of both are sent back.
    """

    def __init__(
        self,
        model: "Network",
        trainable: Mapping[str, Array],
        step: TrainingStep,
        objective: Objective = next_token,
    ) -> None:
        stages = None if model.division is None else model.division.stages
        if stages is None:
            cure = "load it with load(folder, pipeline=comm)"
            raise ConfigError(f"ModelStage: the model is not divided into stages; {cure}")
        self.model, self.trainable, self.stages = model, trainable, stages
        self.step, self.objective = step, objective
        self.saved: dict[tuple[int, int], _Saved] = {}
        self.sums: dict[str, Array] = {}

    def like(self, microbatch: Mapping[str, Any]) -> tuple[Array, ...]:
        """Return new arrays for the hidden states, and sums, of a microbatch between stages."""
        tokens = microbatch["tokens"]
        rows = tokens.shape if microbatch.get("offsets") is None else (1, tokens.size)
        if (context := self._context(microbatch)) is not None:
            rows = (rows[0], len(context.order))
        table, experts = self.model.table, self.model.config.experts
        hidden = self.stages.like(table, (*rows, self.model.config.hidden))
        if experts is None or not self.model.config.balanced:
            return (hidden,)
        return hidden, np.zeros_like(table, np.float64, shape=(2, experts.choices))

    def forward(self, step: Step, microbatch: Mapping[str, Any], xs: Any) -> Any:
        """Return the outputs of a chunk of blocks, or the loss after the last chunk."""
        tape, of = Tape(), self.stages.chunk_of
        own = {n: a for n, a in self.trainable.items() if step.chunk in of(n.removeprefix(PREFIX))}
        watched = {name: tape.watch(array) for name, array in own.items()}
        arrived = tuple(tape.watch(x) for x in xs or ())
        ys = self.run(step.chunk, microbatch, arrived, watched)
        dy, value = None, ys
        if self.stages.ends_with(step.chunk):
            dy, value = start_of_backward(ys, self.step.scaler)
            ys = (ys,)
        else:
            value = tuple(map(value_of, ys))
        self.saved[step.microbatch, step.chunk] = _Saved(tape, arrived, ys, watched, dy)
        return value

    def backward(self, step: Step, dys: Any) -> Any:
        """Add the gradients of weights to ``sums``; return the gradients of the chunk's inputs."""
        tape, xs, (y, *sums), watched, dy = self.saved.pop((step.microbatch, step.chunk))
        if dy is None:
            dy, *dsums = dys
        if sums:  # backward starts at two outputs: one tape entry passes both upstream gradients
            both = {"hidden": dy, "sums": dsums[0]}
            y = taped("passed on", y.value, lambda dy, wanted: both, hidden=y, sums=sums[0])
        variables = [*watched.values(), *xs]
        gradients = tape.gradients(y, variables, dy, release=True)
        for name, gradient in zip(watched, gradients, strict=False):
            if name in self.sums:
                accumulate_(self.sums[name], gradient)
            else:
                self.sums[name] = cast(gradient, dtype="float32")
        return tuple(gradients[len(watched) :]) if xs else None

    def passed(self, microbatch: Mapping[str, Any]) -> Any:
        """Return the objective of a microbatch in the last stage, without backward."""
        return through(
            self.stages,
            lambda: self.like(microbatch),
            lambda chunk, xs: self.run(chunk, microbatch, xs or (), {}),
        )

    def _context(self, microbatch: Mapping[str, Any]) -> Context | None:
        """Return the context of a microbatch; None if ranks do not divide tokens."""
        model, kind = self.model, self.model.context_attention
        tokens, mask, offsets = (microbatch.get(n) for n in ("tokens", "mask", "offsets"))
        return Context.of(model.context, tokens, mask, offsets, kind)

    def run(
        self, chunk: int, microbatch: Mapping[str, Any], xs: Any, watched: Mapping[str, Any]
    ) -> Any:
        """Return the outputs of a chunk, or the loss after the last chunk."""
        tokens, offsets = microbatch["tokens"], microbatch.get("offsets")
        model = self.model.on_tape({**self.model.parameters, **watched}, self.step)
        context, mask = self._context(microbatch), microbatch.get("mask")
        routes, experts = microbatch.get("routes"), model.config.experts
        reads = model.config.balanced or (experts is not None and model.seen is not None)
        call = model.call(
            model.parameters, tokens, mask, offsets=offsets, context=context, routes=routes,
            routers=[] if reads else None,
        )  # fmt: skip
        rows = own_tokens(context, tokens if offsets is None else tokens.reshape(1, -1))
        x, *before = xs or (None,)
        y = chunk_of_blocks(call, self.stages, chunk, rows, x, self.step.checkpoint)
        model.report_routes(call, self.stages.layers[chunk].start)
        sums: tuple[Any, ...] = ()
        if experts is not None and model.config.balanced:
            real, (none,) = real_tokens(context, mask, rows), before or self.like(microbatch)[1:]
            sums = (
                router_sums(
                    experts, [each.logits for each in call.experts.routers or ()], real, none
                ),
            )
        if not self.stages.ends_with(chunk):
            return y, *sums
        reached = Reached(y, routes, *sums)
        return self.objective(model.on_tape(call.parameters, self.step, reached), **microbatch)


def pipeline_gradients(
    stage: ModelStage, schedule: Schedule, microbatches: Sequence[Mapping[str, Any]]
) -> tuple[float, dict[str, Array]]:
    """Return the sum of the losses, equal in all ranks, and the sums of this rank's gradients."""
    stages = stage.stages
    losses = run_pipeline(stage, schedule, microbatches, stages.comm)
    total = np.array(sum(map(float, losses)), np.float64)
    loss = float(stages.shared(total))
    if stages.ends is not None and EMBEDDING in stage.sums:
        stage.sums[EMBEDDING] = stages.ends.all_reduce(stage.sums[EMBEDDING])
    return loss, stage.sums


def pipeline_loss(stage: ModelStage, microbatch: Mapping[str, Any]) -> float:
    """Return the loss of a microbatch, equal in all ranks, without backward."""
    result = stage.passed(microbatch)
    return float(stage.stages.shared(np.array(float(result) if stage.stages.last else 0.0)))


def pipeline_results(
    model: "Network", function: Objective, batch: Mapping[str, Any], forms: Sequence[Any]
) -> list[Array]:
    """Return the arrays of ``function(model, **batch)``, equal in all ranks.

    The last stage computes them; ``forms`` are their shapes and dtypes for the other stages.
    """
    stage = ModelStage(model, {}, model.step, function)
    results = stage.passed(batch)
    if not stage.stages.last:
        results = [np.empty_like(model.table, dtype, shape=shape) for shape, dtype in forms]
    return [stage.stages.shared(each) for each in results]


def through_blocks(
    model: "Network", call: Call, tokens: Array, head: Callable[[Array], Array], rows: int
) -> Array:
    """Return ``head`` of the hidden states, (rows, vocab) logits, equal in all ranks."""
    stages: Any = None if model.division is None else model.division.stages
    shape = (*tokens.shape, model.config.hidden)

    def run(chunk: int, x: Any) -> Any:
        y = chunk_of_blocks(call, stages, chunk, tokens, x)
        return head(y) if stages.ends_with(chunk) else y

    result = through(stages, lambda: stages.like(model.table, shape), run)
    if not stages.last:
        result = stages.like(model.table, (rows, model.config.vocab))
    return stages.shared(result)


def routed_by_all(
    model: "Network", stages: Stages, own: Sequence[Routed], shape: Sequence[int]
) -> list[Routed]:
    """Return the experts that the routers of all stages chose, equal in all ranks."""
    experts: Any = model.config.experts
    places = [
        sum(experts.sparse[:n]) for blocks in stages.layers for n in blocks if experts.sparse[n]
    ]
    every = np.zeros_like(model.table, np.int32, shape=(sum(experts.sparse), *shape, experts.k))
    for place, routed in zip(places, own, strict=True):
        every[place] = routed.experts
    return [Routed(None, each) for each in stages.comm.all_reduce(every)]


def chunk_of_blocks(
    call: Call,
    stages: Stages,
    chunk: int,
    tokens: Array,
    x: Any,
    checkpoint: CheckpointConfig | None = None,
) -> Any:
    """Return the hidden states after a chunk; the last chunk normalises them.

    x is the output of the previous chunk, None for the first chunk.
    """
    branch = embedded(call.config, call.parameters, tokens, call.division) if x is None else x
    branch, stream = blocks(call, branch, checkpoint, stages.layers[chunk])
    if stages.ends_with(chunk):
        return join(call, "model.", call.config.norms.last, branch, stream)[0]
    return branch if stream is None else add(branch, stream)


def through(stages: Stages, like: Callable[[], Any], run: Callable[[int, Any], Any]) -> Any:
    """Pass arrays through the chunks of all ranks; return the output of this rank's last chunk."""
    comm, x = stages.comm, None
    for chunk in range(stages.chunks):
        source = producer(comm.size, stages.chunks, comm.rank, Step(0, chunk))
        if source is not None and source[0] != comm.rank:
            x = receive(comm, like(), source[0])
        x = run(chunk, x)
        target = consumer(comm.size, stages.chunks, comm.rank, Step(0, chunk))
        if target is not None and target[0] != comm.rank:
            send(comm, x, target[0])
    return x


def schedule_of(stages: Stages, microbatches: int, kind: str = "1f1b") -> Schedule:
    """Return a schedule of this kind, or an interleaved schedule if ranks have several chunks."""
    kind = kind if stages.chunks == 1 else "interleaved"
    return pipeline_schedule(stages.comm.size, microbatches, kind, chunks=stages.chunks)
