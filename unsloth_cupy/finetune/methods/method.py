"""Training methods: the inputs of a loss, the loss itself, and the metrics in the log.

    loss = method(model, **method.inputs(batch), **method.counts([batch]))

``inputs`` returns the arrays that the loss reads.  Each group of ``group`` consecutive texts in a
batch belongs together, for example the two texts of a preference pair.  The loss appends sums to a
``sink``, and ``measures`` turns these sums into the metrics of a log line.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from ...core.dtypes import FLOAT32, Array
from ...errors import ConfigError
from ...models.graphs import rounded
from ...models.objective import IGNORE, next_token
from ...ops.linear.embedding import embedding
from ...placement import full_like, to_device_of
from ...training.variable import Var
from ..data.rows import Format
from ..data.text import Batch
from ..naming import named
from ..setting import setting

BATCH = {"tokens", "labels", "offsets"}  # entries of a batch that the next-token loss reads
# settings that divide one model among ranks
RANKS = ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel")
FOLDERS = ("reference", "teacher")  # settings that name the folder of another model


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedOptions:
    """Settings that several methods share."""

    beta: float | None = setting(
        "method", "Preference methods: beta of the loss (in dpo, the scale of the implicit"
        " rewards).  distill: beta of the jsd loss.  grpo: weight of the KL divergence from the"
        " initial model.  [default: 0.1; 0 for distill and grpo]", least=0,
    )  # fmt: skip
    temperature: float | None = setting(
        "method", "Softmax temperature.  distill: of teacher and student.  embed: of the cosine"
        " similarities.  grpo and rloo: of sampling.  [default: 1; 0.05 for embed]", above=0,
    )  # fmt: skip
    reference: str | Path | None = setting(  # noqa: RUF009 -- a field
        "method",
        "Folder of the reference model.  [default: the initial model of the run]",
        kept=False,
    )


@dataclasses.dataclass(frozen=True)
class Method(Format):
    """Trains next-token prediction; a subclass overrides what differs in its method.

    Attributes
    ----------
    uses : tuple of str
        Names of the method-specific settings that this method reads.
    rates : (float, float), optional
        Default learning rates: for full fine-tuning, and for adapters.
    largest : int
        Number of trailing entries of ``sums`` that are reduced by maximum instead of by sum.
    head : str, optional
        The head that the method trains, initialized if the model has another one; None: the
        head of the model.
    names : tuple of str
        Names of the outputs of this head.
    example : str
        Example call of the trained model, if it does not generate text.
    loss_options : dict
        Options of the loss, read from the settings.
    constants : tuple of str
        Names of the results of ``before`` that the loss reads.

    ``Format`` documents all other attributes.
    """

    uses: tuple[str, ...] = ()
    rates: tuple[float, float] | None = None
    largest: int = 0
    head: str | None = None
    names: tuple[str, ...] = ()
    example: str = ""
    loss_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    constants: tuple[str, ...] = ()

    @property
    def compares(self) -> bool:
        """Whether the loss uses the log-probabilities of a reference model."""
        return "reference" in self.uses

    @property
    def other_models(self) -> Sequence[Any]:
        """The other models that the loss runs, such as a teacher."""
        return ()

    def bound(self, settings: Any) -> Self:
        """Return a copy of this method that stores the values of the settings."""
        return dataclasses.replace(self, loss_options=self.options(settings))

    def options(self, settings: Any) -> dict[str, Any]:
        """Return the settings of this method that are set, under the names of the loss options."""
        chosen = {n: getattr(settings, n) for n in self.uses if n not in FOLDERS}
        if self.losses:
            chosen["kind"] = chosen.pop("loss", None) or self.losses[0]
        return {name: value for name, value in chosen.items() if value not in (None, ())}

    def check(self, settings: Any) -> None:
        """Raise a ConfigError for settings that the loss does not accept."""
        ranks = [name for name in RANKS if (getattr(settings, name) or 1) > 1]
        if ranks and settings.invariant:
            cure = f"use {named('data_parallel')} in place of {named(*ranks)}"
            raise ConfigError(f"{named('invariant')} needs an undivided model; {cure}")
        if not settings.by_text:
            return
        for name, value in {"zero": 3, "graph": True}.items():
            if getattr(settings, name) == value:
                both = f"{named('invariant')} does not support {named(**{name: value})}"
                raise ConfigError(f"{both} with {named(method='sft')}; leave one of them out")
        if (count := settings.data_parallel or 1) & (count - 1):
            cure = f"start {1 << (count.bit_length() - 1)} or {1 << count.bit_length()}"
            problem = f"{named('invariant')} adds up halves of the data ranks"
            raise ConfigError(f"{problem}, and {count} are not a power of two; {cure}")

    def check_ranks(self, settings: Any) -> None:
        """Raise a ConfigError for a layout of ranks that cannot compute the loss."""

    def fitted(self, text: Any, config: Mapping[str, Any]) -> Self:
        """Return this method, completed from the data and the config.json of the model."""
        return self

    def first(self, step: int, accumulate: int) -> int:
        """Return the index of the first batch of a step of ``accumulate`` batches."""
        return step * accumulate

    def steps(self, batches: int, accumulate: int) -> int:
        """Return the number of steps for this number of batches."""
        return -(-batches // accumulate)

    def updates(self, accumulate: int) -> int:
        """Return the number of steps that share one rollout."""
        return 1

    def with_models(self, read: Callable[[Any], Any]) -> Self:
        """Return this method with ``read(folder)`` as the model of each reward model."""
        return self

    def files(self, config: Any) -> dict[str, str]:
        """Return the names and contents of files to save next to the model."""
        return {}

    @property
    def loading(self) -> dict[str, Any]:
        """The options of ``models.load`` that select the head."""
        return {} if self.head is None else {"head": self.head, "labels": len(self.names) or None}

    def settled(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the content of config.json with the names of the head outputs."""
        if not self.names:
            return dict(config)
        id2label = {str(index): name for index, name in enumerate(self.names)}
        label2id = {name: index for index, name in enumerate(self.names)}
        return {**config, "id2label": id2label, "label2id": label2id}

    def __call__(self, model: Any, **batch: Any) -> Any:
        """Return the loss of a batch; ``inputs`` and ``counts`` return its entries."""
        return next_token(model, **batch)

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """Return the arrays of a batch that the loss reads, as NumPy arrays."""
        return {"tokens": batch.tokens, "labels": batch.labels, "offsets": batch.offsets}

    def padded(self, batch: Batch) -> Batch:
        """Return a batch as ``in_few_sizes``, if this method supports it, for CUDA graphs."""
        return batch

    def counts(self, batches: Sequence[Batch]) -> dict[str, Any]:
        """Return the divisors of the loss, counted over the batches of a step."""
        return {"count": max(1, sum(batch.label_count for batch in batches))}

    def before(
        self, model: Any, batches: Sequence[Batch], summed: Callable[[Array], Array]
    ) -> dict[str, Any]:
        """Return numbers that depend on all batches of a step; the loss reads ``constants``.

        ``batches`` are the batches of this rank; ``summed`` sums an array over all ranks.
        """
        return {}

    def joined(self, parts: Sequence[Array], data: Any = None) -> Array:
        """Reduce the sums of the batches of a step, and reduce over the data ranks ``data``."""
        total, cut = np.zeros(self.sums), self.sums - self.largest
        total[cut:] = -np.inf
        for part in parts:
            total[:cut] += part[:cut]
            total[cut:] = np.maximum(total[cut:], part[cut:])
        if data is not None and data.size > 1 and self.sums:
            total[:cut] = data.all_reduce(total[:cut])
            total[cut:] = data.all_reduce(total[cut:], "max") if self.largest else []
        return total

    def measures(self, sums: Array, **constants: Any) -> dict[str, float | None]:
        """Return the metrics for the log from the reduced sums of a step."""
        return {}

    def question_length(self, tokens: int) -> int:
        """Return the minimum number of question tokens in a full row of ``tokens`` tokens."""
        return 0

    def full(self, batch: int, tokens: int) -> dict[str, Any]:
        """Return the inputs of ``batch`` full groups as views of one group, to plan memory."""
        rows = np.ones((self.group, tokens), np.int64)
        labels = rows.copy()
        labels[:, : self.question_length(tokens)] = IGNORE
        beside: dict[str, Array] = {"desirable": rows > 0, "real": rows > 0}
        beside["value"] = np.zeros(rows.shape)
        beside |= {"reference": np.zeros(rows.shape, FLOAT32), "taught": np.zeros_like(rows)}
        one = self.inputs(Batch(rows, labels, None, 1, rows.size, self.group, beside)).items()
        return {
            name: np.broadcast_to(array[:1], (batch * len(array), *array.shape[1:]))
            for name, array in one
            if array is not None
        }


def loss_of_none(model: Any, batch: Mapping[str, Any]) -> Any:
    """Return a loss of 0 for a rank without texts: it still joins the collectives."""
    loss = next_token(model, **{name: batch[name] for name in batch.keys() & BATCH})
    return loss * 1.0  # the dtype of the loss on the other ranks


def in_few_sizes(batch: Batch) -> Batch:
    """Return a batch with padding, so that batches have few sizes: each is one CUDA graph.

    Tokens of padding have no label.  In a packed batch they are one more text, and empty texts
    follow it.  The facts "texts" and "filled" are the numbers of texts and of
    tokens per row before padding.
    """
    rows, tokens = batch.tokens.shape
    shapes = {"tokens": (rows, tokens)}
    if batch.offsets is not None:  # at least one token of padding, the value of all empty texts
        shapes = {"tokens": (rows, tokens + 1), "offsets": batch.offsets.shape}
    sizes = rounded(shapes)
    more = sizes["tokens"][1] - tokens
    arrays = {"tokens": batch.tokens, **batch.beside}
    wide = {
        name: np.pad(
            each,
            ((0, 0), (0, more)) + ((0, 0),) * (each.ndim - 2),
            constant_values=-1 if name == "routes" else 0,  # -1: to no expert
        )
        for name, each in arrays.items()
    }
    labels = np.pad(batch.labels, ((0, 0), (0, more)), constant_values=IGNORE)
    facts = {**batch.facts, "texts": np.array(len(starts_of(batch)) - 1)}
    facts["filled"] = np.array(tokens)
    offsets = batch.offsets
    if offsets is not None:
        offsets = np.pad(
            offsets, (0, sizes["offsets"][0] - len(offsets)), constant_values=tokens + more
        )
    return batch._replace(
        tokens=wide.pop("tokens"), labels=labels, offsets=offsets, beside=wide, facts=facts
    )


def firsts(batch: Batch, name: str) -> Array:
    """Return the value of an array at the first token of each text; 0 for texts of padding."""
    values = batch.beside[name].reshape(-1)
    first: Array = values[np.minimum(starts_of(batch)[:-1], values.size - 1)]
    return first


def real_texts(batch: Batch, group: int = 1) -> dict[str, Array]:
    """Return weights of 1 for groups of texts, of 0 for padding; none for a batch without."""
    if "texts" not in batch.facts:
        return {}
    groups = (len(starts_of(batch)) - 1) // group
    return {"weights": (np.arange(groups) * group < batch.facts["texts"]).astype(FLOAT32)}


def averaged(loss: Callable[..., Any], *arrays: Any, count: Any, **options: Any) -> Any:
    """Return ``loss(...) / count``; in a CUDA graph, the count is an array of one number."""
    if hasattr(count, "shape"):
        return loss(*arrays, count=1, **options) / count
    return loss(*arrays, count=count, **options)


def value_of(array: Any) -> Any:
    """Return the array of a Var; return any other value unchanged."""
    return array.value if type(array) is Var else array


def gathered(log_probs: Any, places: Array) -> Any:
    """Return the entries of ``log_probs`` at these flat indices, in the shape of ``places``."""
    return embedding(places, log_probs.reshape(-1, 1)).reshape(places.shape)


def halves(count: int) -> tuple[slice, slice]:
    """Return the slice of the first ``count`` rows and the slice of all other rows."""
    return slice(count), slice(count, None)


def stacked(sums: Sequence[Any], like: Array) -> Array:
    """Return numbers and scalar arrays as one array in the dtype of ``like``."""
    values: list[Any] = [value_of(each) for each in sums]
    return np.stack(
        [
            each.astype(like.dtype) if hasattr(each, "shape") else full_like(like, each, ())
            for each in values
        ]
    )


def placed(arrays: Mapping[str, Any], like: Any) -> dict[str, Any]:
    """Copy NumPy arrays to the device of ``like``; return other values unchanged."""
    return {
        name: to_device_of(value, like) if isinstance(value, np.ndarray) else value
        for name, value in arrays.items()
    }


def starts_of(batch: Batch) -> list[int]:
    """Return the flat index of the first token of each text, then the number of tokens."""
    if batch.offsets is not None:
        return [*map(int, batch.offsets)]
    rows, width = batch.tokens.shape
    return [width * row for row in range(rows + 1)]


def every(batch: Batch, start: int) -> Batch:
    """Return the texts ``start``, ``start + group``, ... of a batch as a batch."""
    step, beside = batch.group, batch.beside
    arrays = {"tokens": batch.tokens, "labels": batch.labels, **beside}
    starts, offsets = starts_of(batch), None
    if batch.offsets is None:
        chosen = {name: array[start::step] for name, array in arrays.items()}
    else:
        texts = [*zip(starts[start:-1:step], starts[start + 1 :: step], strict=True)]
        where = np.concatenate([np.arange(*text) for text in texts] or [np.arange(0)])
        chosen = {name: array.reshape(1, -1)[:, where] for name, array in arrays.items()}
        offsets = np.cumsum([0, *(stop - begin for begin, stop in texts)])
    tokens, labels = chosen.pop("tokens"), chosen.pop("labels")
    return Batch(tokens, labels, offsets, batch.label_count, batch.real, 1, chosen)


def answers(batch: Batch, order: Sequence[int], *, reference: bool) -> dict[str, Array]:
    """Return the flat indices of the log-probabilities of answers, one row per text in ``order``.

    ``places`` (texts, longest answer) indexes the flattened log-probabilities.  ``answer_mask`` is
    False at the padding of ``places``, which is the last index: no token has this log-probability.
    ``reference`` holds the reference log-probabilities of the batch at these indices.
    """
    starts, labels = starts_of(batch), batch.labels.reshape(-1)
    indices = [
        np.flatnonzero(labels[starts[text] + 1 : starts[text + 1]] != IGNORE) + starts[text]
        for text in order
    ]
    longest = max(map(len, indices), default=0)
    if "texts" in batch.facts:  # a power of two, as each size is another graph
        longest = max(16, 1 << (longest - 1).bit_length())
    places = np.full((len(indices), longest), max(0, labels.size - 1))
    mask = np.zeros(places.shape, bool)
    for row, own, each in zip(places, mask, indices, strict=True):
        row[: len(each)], own[: len(each)] = each, True
    arrays = {"places": places, "answer_mask": mask}
    if reference:  # stored at the token itself, which the model predicts one index earlier
        shifted = np.append(batch.beside["reference"].reshape(-1)[1:], np.float32(0))
        arrays["reference"] = shifted[places] * mask
    return arrays
