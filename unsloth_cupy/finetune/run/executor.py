"""Losses and gradients of a model that ranks may split, and gathering of its arrays."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.arrays import Unwritten
from ...core.gpu import device_of
from ...core.stand_in import is_planned
from ...errors import ConfigError
from ...models.adapters.adapter import Adapter
from ...models.graphs import Sums
from ...models.layers.context import Context, own_tokens
from ...models.objective import Objective, TrainingStep, next_token
from ...models.ranks.division import apart
from ...models.ranks.gather import whole_parameters
from ...models.ranks.parts import Parts
from ...models.ranks.stages import ModelStage, pipeline_gradients, pipeline_loss, schedule_of
from ...ops.elements.arithmetic import add
from ...ops.elements.cast import cast
from ...ops.linear.dropout import noise as drawn
from ...ops.optimizers.gradients import GradientMeasure, square_sum
from ...parallel.data import DataParallel
from ...parallel.ulysses import check_heads
from ...parallel.zero import Zero1
from ...parallel.zero3 import Zero3
from ...placement import full_like, to_device_of, to_numpy
from ...training.averages import in_one_form, scale_per_code, stored_form, wide_moments
from ...training.gradients import measure_gradients, sum_gradients, sum_in_halves
from ...training.joined import Joined
from ...training.optimizer import Optimizer
from ...training.precision import DTYPES, compute_copies
from ...training.variable import Var
from ..lora import check_learns
from ..methods.method import Method
from .metrics import Counts, Watch

if TYPE_CHECKING:
    from ...models import Transformer
    from ...training.loss_scaler import LossScaler
    from .ranks import Ranks


class Executor:
    """Collective operations of all ranks on a model.

    Attributes
    ----------
    by_text : bool
        Whether each text is a pass of its own, and ``in_halves`` is the order of sums, so that
        results do not depend on ranks: see ``Settings.by_text``.
    graph : bool
        Whether a GPU may replay passes as CUDA graphs: see ``models.graphs``.
    parts : Zero3 or None
        With ZeRO-3: splits the parameters over the ranks that would otherwise hold the same
        weights (``Ranks.replicas``); the model then holds parts.
    """

    def __init__(
        self,
        ranks: "Ranks",
        model: "Transformer",
        objective: Objective = next_token,
        graph: bool = False,
        by_text: bool = False,
    ) -> None:
        size = ranks.groups.context.size
        self.largest, self.by_text = 0, by_text
        if size > 1 and isinstance(objective, Method):
            self.largest, objective = objective.largest, partial(share_of, objective, size)
        self.ranks, self.model, self.objective = ranks, model, objective
        self.data, self.replicas = ranks.data, ranks.replicas
        trained: Any = model
        model.context = ranks.groups.context if ranks.groups.context.size > 1 else None
        model.context_attention = ranks.context_attention or "ring"
        if model.context is not None and model.context_attention == "ulysses":
            check_heads(model.config.heads, model.config.kv_heads, model.context)
        self.parts = Zero3(model, self.replicas) if ranks.zero == 3 else None
        alone = self.replicas.size == 1 or self.parts is not None
        self.data_parallel = None if alone else DataParallel(trained, self.replicas, halves=by_text)
        self.states: Zero1 | None = None
        self.stages = None if model.division is None else model.division.stages
        # whether a loss needs collective operations, so that all ranks must compute one
        self.together = self.parts is not None or model.expert_ranks is not None
        # a graph adds up passes in their order, and pads texts
        self.graph = graph and self.stages is None and self.parts is None and not by_text
        # one object, as a graph serves calls of the same function
        self.padded_objective = partial(with_padding, self.objective)

    @property
    def pads(self) -> bool:
        """Whether ``Method.padded`` adds padding to batches, so that graphs can repeat."""
        model = self.model
        divided = (model.division, model.context, model.gather) != (None,) * 3
        return self.graph and not (divided or isinstance(model.table, np.ndarray))

    @property
    def drops(self) -> bool:
        """Whether the adapter has dropout."""
        return self.model.adapter is not None and self.model.adapter.dropout > 0

    def copies(self, dtype: str) -> dict[str, Any]:
        """Return copies of parameters in the compute dtype, with which the model computes."""
        if self.stages is not None:
            self.stages.dtype = DTYPES[dtype]
        if self.parts is not None:
            return self.parts.compute_copies(dtype)
        return compute_copies(self.model.narrowed(DTYPES[dtype]), dtype)

    def optimizer(self, optimizer: Optimizer | Joined) -> Optimizer | Joined | Zero1:
        """Return the optimizer, as a Zero1 if ZeRO splits its states but not the trained arrays."""
        whole = self.parts is None or self.model.adapter is not None  # trained arrays are whole
        if not (self.ranks.zero and whole):
            return optimizer
        division, apart = self.model.division, None
        if division is not None and division.experts is not None:
            apart = division.of_experts, self.ranks.same
        zero1 = Zero1(optimizer, self.replicas, apart)
        # else gradients are summed already; with by_text they stay whole, so that their norm is
        # summed in one order
        self.states = None if self.parts is not None or self.by_text else zero1
        return zero1

    def gradients(
        self,
        passes: Sequence[Mapping[str, Any]],
        step: TrainingStep,
        numbers: Sequence[int] | None = None,
        noise: float = 0.0,
        starts: Sequence[int] = (),
    ) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Yield the losses and gradients of passes; a step sums them over passes and data ranks.

        ``numbers`` are the numbers of the passes in the run: with ``step.seed`` they determine
        dropout masks and the noise of embeddings.  Both depend on the number of a token in the
        batch, not on the rank that holds the token; ``starts`` are the numbers of this rank's first
        tokens.
        """
        if self.stages is None:
            trained = self.model if self.parts is None else self.parts
            sums: Sums = {} if len(passes) > 1 else None
            for place, batch in enumerate(passes):
                objective = self.padded_objective if "filled" in batch else self.objective
                function, seed, first = partial(objective, **batch), None, 0
                if numbers is not None and (self.drops or noise):
                    random = np.random.default_rng([step.seed or 0, numbers[place]])
                    seed = int(random.integers(2**63)) if self.drops else None
                    first = starts[place] if starts else 0
                    if noise:
                        key = to_device_of(np.array(random.integers(2**63)), self.model.table)
                        function = partial(noisy, objective, noise, noise_key=key, **batch)
                    if first:
                        function = partial(
                            beginning_at, first, function.func, *function.args, **function.keywords
                        )
                own = step._replace(seed=seed)
                if not self.graph:
                    yield trained.value_and_gradients(function, **own._asdict())
                    continue
                model = self.model
                value, gradients = model.graphs(model, model.passes, function, own, sums)
                sums = None if sums is None else gradients
                yield value, gradients
            return
        step = step._replace(seed=None)
        stage = ModelStage(self.model, self.model.trainable, step, self.objective)
        schedule = schedule_of(self.stages, len(passes), self.ranks.schedule or "1f1b")
        yield pipeline_gradients(stage, schedule, passes)

    def summed(
        self, passes: Iterator[tuple[Any, dict[str, Any]]], count: int
    ) -> tuple[float, dict[str, Any]]:
        """Return loss and gradients, summed over passes and over ranks with different rows."""
        count = 1 if self.stages is not None else count
        loss, sums = sum_gradients(passes, count, added=self.graph)
        if self.data_parallel is None:  # one rank, or both are summed over ranks already
            return loss, sums
        sum_ranks = self.data_parallel.sums if self.states is None else self.states.sums
        return float(self.replicas.all_reduce(np.array(float(loss)))[()]), sum_ranks(sums)

    def summed_by_text(
        self, passes: Iterator[tuple[Any, dict[str, Any]]], own: slice, count: int
    ) -> tuple[float, dict[str, Any]]:
        """Return loss and gradients of ``count`` texts, added in one order.

        ``passes`` are the texts ``own``, which this rank computes.
        """
        losses = np.zeros(count)

        def gradients() -> Iterator[dict[str, Any]]:
            for number, (loss, each) in enumerate(passes, own.start):
                with device_of(loss):
                    losses[number] = float(loss)
                yield each

        sums = sum_in_halves(gradients(), own.stop - own.start)
        if self.data_parallel is None:
            return float(losses.sum()), sums
        if not sums:  # no text for this rank: -0.0 changes no sum
            trained = self.model.trainable.items()
            sums = {name: cast(full_like(array, -0.0), dtype="float32") for name, array in trained}
        return float(self.replicas.all_reduce(losses).sum()), self.data_parallel.sums(sums)

    def over_all(self, counts: Any) -> Any:
        """Return the sum of an array over ranks with different rows, and over stages."""
        pipeline = self.ranks.groups.pipeline
        counts = self.replicas.all_reduce(counts)
        return pipeline.all_reduce(counts) if pipeline.size > 1 else counts

    def add(self, updates: Mapping[str, Any]) -> None:
        """Add whole arrays, named by parameter, to this rank's parameters in place."""
        own = updates if self.parts is None else self.parts.divided(updates)
        for name, update in own.items():
            array = self.model.parameters.get(name)
            if array is not None:  # else another stage has this layer
                array += to_device_of(update.astype(array.dtype), array)

    def held_out(self, batches: Sequence[Mapping[str, Any]], sums: int = 0) -> Any:
        """Return for each batch the loss, and counts of its labels or ``sums`` of a method.

        Data ranks compute different batches.
        """
        results, data = np.zeros((len(batches), 1 + (sums or len(Counts())))), self.data
        with apart(self.model.division), self._without_drafts():
            for first in range(0, len(batches), data.size):
                number = first + data.rank
                if number < len(batches):
                    results[number] = self._held_out(batches[number], sums)
                elif self.together:  # other ranks gather weights from here, or send rows
                    self._held_out(batches[first], sums)
        if self.largest:  # maxima, which are equal on all ranks of a context
            results[:, -self.largest :] /= self.ranks.groups.context.size
        return self.replicas.all_reduce(results)

    @contextmanager
    def _without_drafts(self) -> Iterator[None]:
        """Return a context in which the loss is the next-token loss alone."""
        weight, self.model.mtp_weight = self.model.mtp_weight, 0.0
        try:
            yield
        finally:
            self.model.mtp_weight = weight

    def _held_out(self, batch: Mapping[str, Any], sums: int) -> tuple[float, ...]:
        """Return the loss of a batch, without a backward pass, and its counts or sums."""
        sink: list[Any] = []
        arguments = {**batch, "sink": sink} if sums else batch
        if self.stages is not None:
            stage = ModelStage(self.model, {}, TrainingStep(), self.objective)
            loss = pipeline_loss(stage, arguments)
            own = to_numpy(sink[0]).astype(np.float64) if sink else np.zeros(sums)
            return loss, *(self.stages.shared(own) if sums else Counts())
        if sums:
            loss = float(self.objective(self.model, **arguments))
            return loss, *to_numpy(sink[0]).tolist()
        watch = Watch(self.model)
        loss = float(self.objective(watch.view, **batch))
        # with context ranks, this rank has only some of the tokens
        return loss, *(watch.counts(batch) if self.model.context is None else Counts())

    def measured(
        self, gradients: Mapping[str, Any], max_norm: float, scaler: "LossScaler"
    ) -> GradientMeasure:
        """Return ``measure_gradients`` over all ranks; each gradient counts once."""
        division, holder = self.model.division, self.parts or self.states
        if division is None:
            measure = measure_gradients if holder is None else holder.measure_gradients
            return measure(gradients, max_norm, scaler=scaler)
        whole, parts = 0.0, {self.replicas: 0.0, self.ranks.same: 0.0}
        for name, gradient in gradients.items():
            place, shares = self._place(name), division.shares(name)
            if place is None:
                whole += squares(gradient.reshape(-1), 0, gradient.shape, shares)
            else:
                apart = division.experts is not None and division.of_experts(name)
                parts[self.ranks.same if apart else self.replicas] += squares(
                    gradient, *place, shares
                )
        for group, divided in parts.items() if holder is not None else ():
            whole += float(group.all_reduce(np.array(float(divided)))[()])
        total, stages = np.array(float(whole)), division.stages
        for group in (*division.groups, *([] if stages is None else [stages.comm])):
            total = group.all_reduce(total)
        norm = math.sqrt(total[()]) / scaler.value
        clipped = max_norm / norm if norm > max_norm else 1.0
        return GradientMeasure(norm, math.isfinite(norm), clipped / scaler.value)

    def adapter_report(self, adapter: Adapter, gradients: Mapping[str, Any]) -> str | None:
        """Return ``check_learns`` for the gradients of all ranks."""
        division, ranks = self.model.division, self.ranks
        if division is None and self.states is None:
            return check_learns(adapter, gradients)
        whole = self.gathered(gradients if self.states is None else self.states.gathered(gradients))
        outcome = ""
        if ranks.first and whole is not None:
            try:
                report = check_learns(adapter, whole, None if division is None else division.shapes)
                outcome = "later" if report is None else f"said {report}"
            except ConfigError as error:
                outcome = f"wrong {error}"
        kind, _, text = ranks.broadcast(outcome).partition(" ")
        if kind == "wrong":
            raise ConfigError(text)
        return None if kind == "later" else text

    def _place(self, name: str) -> tuple[int, tuple[int, ...]] | None:
        """Return the start of this rank's part of a parameter, and the shape of the parameter.

        None: this rank has the whole parameter.
        """
        if self.states is not None:
            return self.states.own[name].start, self.states.shapes[name]
        cut = None if self.parts is None else self.parts.cuts.get(name)
        return None if cut is None else (self.replicas.rank * cut.length, cut.shape)

    def unwritten(self, named: Mapping[str, Any]) -> dict[str, Unwritten]:
        """Return arrays, named by parameter or as ``AdamW.state()``, as ``replicas`` gather them.

        ``replicas`` gather an array of parts when they read it, one by one and in one order.
        """
        return {name: self._unwritten(name, array) for name, array in named.items()}

    def _unwritten(self, name: str, array: Any) -> Unwritten:
        """Return an array, or with ZeRO-3 the whole array of parts."""
        cut = None if self.parts is None else self.parts.cut_of(name)[0]
        if cut is None or self.parts is None or isinstance(array, Unwritten):
            whole = Unwritten(array.dtype, tuple(array.shape), lambda: array)
            return array if isinstance(array, Unwritten) else whole
        gathered = self.parts.gathered
        return Unwritten(array.dtype, cut.shape, lambda: gathered({name: array})[name])

    def gathered(self, named: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return whole arrays by parameter name on rank 0, None on other ranks."""
        division, first = self.model.division, self.ranks.same.rank == 0
        own = dict[str, Any]()
        for name, each in self.unwritten(named).items():
            array = each.read()
            if first:  # in host memory: a GPU may have no room for all whole arrays
                moves = self.parts is not None and division is None
                own[name] = to_numpy(array) if moves else array
        if not first or division is None:
            return own if first else None
        return next(iter([*whole_parameters(own, division)]), None)

    @property
    def writing(self) -> Parts:
        """The ranks that write whole arrays."""
        ranks = self.ranks
        return Parts(ranks.comm, ranks.groups, ranks.same, self.model.division)

    def whole(self, arrays: Mapping[str, Unwritten]) -> dict[str, Unwritten]:
        """Return arrays that ``replicas`` gather in the form of a checkpoint, with whole shapes.

        ``read`` still returns this rank's slice of a divided model; ``writing`` gathers slices.
        """
        division, result = self.model.division, dict[str, Unwritten]()
        if division is None:
            return dict(arrays)
        wide = wide_moments(arrays.keys(), division.groups)
        for name in arrays:
            each = in_one_form(name, arrays, wide)
            if each is not None:
                result[name] = each._replace(shape=division.whole_shape(name, each.shape))
        return result

    def own(self, named: Mapping[str, Any], narrow: Collection[str]) -> dict[str, Any]:
        """Return this rank's parts of whole moments, as 8-bit codes for names in ``narrow``."""
        division = self.model.division
        if division is not None:  # names contain a parameter's name, as mean.model.norm.weight
            held = (
                n for n in scale_per_code(named).items() if division.holds(n[0].partition(".")[2])
            )
            named = {name: division.own(name, array) for name, array in held}
        named = stored_form(named, narrow)
        return named if self.parts is None else self.parts.divided(named)


def beginning_at(first: int, objective: Objective, *arguments: Any, **batch: Any) -> Any:
    """Call an objective; ``first`` is the number of the model's first token in the batch.

    The model is the last of ``arguments``.
    """
    arguments[-1].first_token = first
    return objective(*arguments, **batch)


def with_padding(objective: Objective, model: "Transformer", *, filled: Any, **batch: Any) -> Any:
    """Call an objective with padding after the first ``filled`` tokens of each row."""
    model.filled = filled
    return objective(model, **batch)


def noisy(
    objective: Objective,
    size: float,
    model: "Transformer",
    *,
    noise_key: Any,
    **batch: Any,
) -> Any:
    """Call an objective with noise added to the embeddings of the model (NEFTune).

    The noise of a text of L tokens is uniform in -1 .. 1, times size / sqrt(L hidden).  The noise
    of a token depends on the number of the token in the batch of all ranks.  Source: Jain et al.,
    NEFTune: Noisy Embeddings Improve Instruction Finetuning, 2023.
    """
    offsets = batch.get("offsets")

    def add_noise(x: Any, numbers: Any = None, context: Context | None = None) -> Any:
        value: Any = x.value if type(x) is Var else x
        tokens, hidden = value.shape[1:]
        if is_planned(value):
            return add(x, value.of(value.shape, value.dtype))
        sizes, tokens = None, tokens if context is None else context.length
        if offsets is not None:
            after = np.searchsorted(offsets, np.arange(tokens, like=offsets), side="right")
            lengths = offsets[after] - offsets[after - 1]
            sizes = (size / np.sqrt(lengths * hidden)).astype(np.float32)
            sizes = own_tokens(context, sizes[None])[0]
        return add(x, drawn(value, size / math.sqrt(tokens * hidden), noise_key, sizes, numbers))

    model.noise = add_noise
    return objective(model, **batch)


def planned_with_noise(objective: Objective, model: "Transformer", **batch: Any) -> Any:
    """Call an objective for a memory plan, with noise added to embeddings."""
    return noisy(objective, 1.0, model, noise_key=None, **batch)


def squares(
    flat: Any, start: int, shape: Sequence[int], shares: Sequence[tuple[slice, float]]
) -> float:
    """Return the sum of squares of a part of an array, with a weight per row.

    ``flat`` is the part; it begins at element ``start`` of an array of this shape.  ``shares`` are
    slices of rows with their weights.
    """
    total, row = 0.0, math.prod(shape[1:])
    for rows, share in shares:
        first, last, _ = rows.indices(shape[0])
        part = flat[max(0, first * row - start) : max(0, last * row - start)]
        total += share * float(square_sum(part))
    return total


def share_of(
    method: Method, size: int, model: Any, sink: list[Any] | None = None, **batch: Any
) -> Any:
    """Return loss / size for a loss that ``size`` ranks compute; scale the sums in ``sink`` too."""
    own: list[Any] = []
    options: dict[str, Any] = {} if sink is None else {"sink": own}
    loss = method(model, **batch, **options)
    for each in own:
        each[: len(each) - method.largest] /= size
    if sink is not None:
        sink += own
    return loss * (1 / size)
