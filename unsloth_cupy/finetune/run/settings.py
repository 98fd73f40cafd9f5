"""The settings of a run, in groups."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, get_args

from ...core.call import check_fields, in_any_case, is_integer, is_list, is_number
from ...errors import ConfigError
from ...machine import one_screen
from ...models.adapters.into import CHOICES
from ...models.layers.context import KINDS as CONTEXTS
from ...models.optimizers import OPTIMIZERS as KINDS
from ...models.optimizers import conflict
from ...models.quantizer import CHOICES as QUANTIZED
from ...parallel.schedule import KINDS as SCHEDULES
from ...training.checkpoint import CheckpointConfig
from ...training.precision import MixedPrecisionConfig
from ..data.records import Records
from ..data.text import Text
from ..lora import ALL, Lora
from ..methods.method import Method
from ..methods.registry import METHODS, OPTIONS, Options, using
from ..naming import named
from ..setting import setting
from .arguments import Arguments
from .new_model import SIZES
from .new_tokens import read_lines
from .rates import DECAYS
from .reporters import REPORTERS

STEPS = 1200  # of a new model, if neither steps nor epochs are given
TOKENS = 128  # in a row of running text
NEW_RATE, RATE, ADAPTER_RATE = 4e-3, 1e-4, 1e-3  # default learning rates
EVALUATIONS = 10  # by default, of a run
SMALL = "adamw8bit"  # adamw with state_bits=8
NAMES = ("adamw", SMALL, *[name for name in KINDS if name != "adamw"])
DEVICES = "auto, cpu, cuda or cuda:1; auto: a GPU if one can be used."
DTYPES = FLOAT, *HALVES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Settings(Options):
    """The settings of a run; each is explained beside its field.

    Attributes
    ----------
    trained_tokens : sequence of int
        Tokens whose rows of the tables are trained beside adapters.
    loss_scale : float
        Of float16: the factor of the loss at first.
    dynamic_scaling : bool
        Whether this factor changes when gradients overflow, and when none did for long.
    keep : sequence of str
        With ``recompute_every``: ops whose results are stored, not recomputed.
    offload : bool
        With ``recompute_every``: store the inputs of blocks in the memory of the host.

    Raises
    ------
    ConfigError
        A value has another type, is out of range or no choice; the message names the field.
    """

    CALL: ClassVar[str] = "Settings"
    pack: bool | None = setting("data", "Lines share rows.  [default: {pack}]", kept=False)
    batch: int = setting("data", "Rows of text in a step.", 4, least=1)
    tokens: int | None = setting(
        "data",
        f"Tokens in a row.  [default: of lines the longest, if it is no outlier, else {TOKENS}]",
        least=2,
    )

    layers: int | None = setting(
        "model", f"Of a new model.  [default: {SIZES['layers']}]", least=1, kept=False
    )
    hidden: int | None = setting(
        "model", f"Of a new model.  [default: {SIZES['hidden']}]", least=1, kept=False
    )
    vocabulary: int | None = setting(
        "model", f"Of a new tokenizer.  [default: {SIZES['vocabulary']}]", least=1, kept=False
    )
    train_weights: bool = setting(
        "model", "With {quantize} ternary: train a new model.", False, kept=False, rare=True
    )
    new_tokens: str | Path | None = setting(  # noqa: RUF009 -- a field
        "model", "File of tokens to add to an existing model, one a line.", kept=False
    )
    # whose rows are trained beside adapters
    trained_tokens: Sequence[int] = dataclasses.field(default=(), metadata={"kept": False})
    device: str | None = setting("model", DEVICES, "auto", kept=False)

    lora: int | None = setting(
        "adapters", "Train adapters of this rank; the model is frozen.", least=1
    )
    lora_alpha: float | None = setting(
        "adapters", "Their scale is alpha / rank.  [default: 2 rank]", above=0
    )
    lora_dropout: float = setting(
        "adapters", "Share of their inputs that is 0 in a step.", 0.0, least=0, below=1
    )
    lora_targets: str | Sequence[str] = setting(
        "adapters", "all, attention, or names of layers, as q_proj,v_proj.", ALL
    )
    rslora: bool = setting("adapters", "Their scale is alpha / sqrt(rank).", False, rare=True)
    dora: bool = setting("adapters", "Train the norms of the weights' rows too.", False)
    base: str | Path | None = setting(  # noqa: RUF009 -- a field
        "adapters", "Base model of the adapter that goes on to learn, if it has moved.", kept=False
    )
    quantize: str | None = setting(
        "adapters", "Store the model in fewer bits, as nf4; with {lora}.", choices=QUANTIZED
    )
    merge_into: str | None = setting(
        "adapters", "Train through the quantizer of the file to merge into, as nf4 or q4_0.",
        choices=CHOICES,
    )  # fmt: skip
    merge_from: int = setting(
        "adapters", "With {merge_into}: after so many steps without it.", 0, least=0, rare=True
    )

    steps: int | None = setting(
        "training",
        f"Updates of the weights.  [default: 1 to 3 epochs; {STEPS} of a new model]",
        least=1,
    )
    epochs: float | None = setting(
        "training", "Passes through the text, in place of {steps}.", above=0, kept=False
    )
    lr: float | None = setting("training", "Highest learning rate.  [default: by model]", above=0)
    embedding_lr: float | None = setting(
        "training",
        "Of the table of tokens and the head, if they learn.  [default: {lr}]",
        above=0,
        rare=True,
    )
    warmup: float = setting(
        "training", "Steps in which {lr} is reached, or a share of all, below 1.", 0.05, least=0
    )
    decay: str | None = setting(
        "training", "How the rate then falls.  [default: cosine; not of schedulefree]",
        choices=(*DECAYS,),
    )  # fmt: skip
    optimizer: str = setting(
        "training", "adamw8bit has averages of 8 bits; muon is for matrices, beside adamw.",
        "adamw", choices=NAMES,
    )  # fmt: skip
    weight_decay: float = setting(
        "training", "Share of the weights removed per step, times lr.", 0.1, least=0
    )
    decay_all: bool = setting(
        "training", "Decay norms, biases and embeddings too.", False, rare=True
    )
    max_norm: float = setting("training", "Norm to clip gradients to.", 1.0, above=0)
    accumulate: int = setting(
        "training", "Batches whose gradients are summed per step.", 1, least=1
    )
    dtype: str | None = setting(
        "training", "Of the computation; trained weights stay float32.  [default: that of the run"
        " that goes on; on a GPU that of the model if it has 16 bits, else bfloat16; on a CPU"
        " float32]", choices=DTYPES,
    )  # fmt: skip
    seed: int = setting(
        "training", "Of new weights, the order of the text and the sample.", 0, least=0
    )
    data_seed: int | None = setting(
        "training", "Of the order of the text.  [default: that of {seed}]", least=0, rare=True
    )
    neftune: float = setting(
        "training", "Add noise of this size to embeddings (NEFTune), as 5.", 0.0, least=0, rare=True
    )
    graph: bool | None = setting(
        "training",
        "On a GPU, repeat steps as CUDA graphs.  [default: for sft]",
        kept=False,
        rare=True,
    )
    find_nan: bool = setting(
        "training", "Name the first layer with a NaN; slower.", False, kept=False, rare=True
    )
    loss_scale: float = 65536.0
    dynamic_scaling: bool = True

    eval: str | Path | float | Records | Text | None = setting(  # noqa: RUF009 -- a field
        "evaluation",
        "File to evaluate on, or a share of the text as 0.05.  [default: a tenth]",
        kept=False,
    )
    evaluate_every: int | None = setting(
        "evaluation", "Steps between evaluations.  [default: a tenth of all steps]", least=1
    )
    patience: int | None = setting(
        "evaluation", "Stop after so many evaluations without a lower loss.", least=1, kept=False
    )
    min_delta: float = setting(
        "evaluation",
        "With {patience}: by how many nats it must be lower.",
        0.0,
        least=0,
        kept=False,
        rare=True,
    )
    keep_best: bool = setting(
        "evaluation",
        "End with the model of the lowest loss; {patience} does too.",
        False,
        kept=False,
    )
    sample_prompt: Sequence[str] = setting(
        "evaluation",
        "Text to continue at each evaluation; may be repeated.",
        (),
        kept=False,
        rare=True,
    )

    recompute_every: int | None = setting(
        "memory", "Keep the input of one block in N: less memory.", least=1
    )
    keep: Sequence[str] = ()
    offload: bool = False
    chunked_mlp: bool = setting(
        "memory", "Compute MLPs in chunks, twice: less memory.", False, rare=True
    )
    state_bits: int = setting("memory", "Bits of the optimizer's averages.", 32, choices=(32, 8))
    limit_memory: int | None = setting(
        "memory", "Limit of array memory, as 2GiB; checked before training.", least=1, kept=False
    )

    tensor_parallel: int | None = setting(
        "ranks", "Ranks that divide each weight.", least=1, kept=False
    )
    pipeline_parallel: int | None = setting(
        "ranks", "Ranks that divide the blocks.", least=1, kept=False
    )
    pipeline_schedule: str | None = setting(
        "ranks", "Pipeline schedule.  [default: 1f1b]", choices=(*SCHEDULES,), kept=False, rare=True
    )
    chunks: int | None = setting(
        "ranks",
        "Parts of each stage, if interleaved.  [default: 2]",
        least=1,
        kept=False,
        rare=True,
    )
    data_parallel: int | None = setting(
        "ranks", "Ranks that divide the rows of a batch.", least=1, kept=False
    )
    context_parallel: int | None = setting(
        "ranks", "Ranks that divide the tokens of each row.", least=1, kept=False
    )
    expert_parallel: int | None = setting(
        "ranks", "Ranks that divide the experts, and the rows of a batch.", least=1, kept=False
    )
    context_attention: str | None = setting(
        "ranks",
        "ulysses: ranks divide heads.  [default: ring]",
        choices=(*CONTEXTS,),
        kept=False,
        rare=True,
    )
    zero: int = setting(
        "ranks", "1: data ranks divide the optimizer's averages; 3: the weights too.", 0,
        choices=(0, 1, 3), kept=False,
    )  # fmt: skip

    out: str | Path | None = setting(  # noqa: RUF009 -- a field
        "output", "Folder of the run.  [default: runs/MODEL-TEXT]", kept=False
    )
    save_dtype: str = setting(
        "output", "Of the weights saved at the end.", "float32", choices=DTYPES, kept=False
    )
    report_to: Sequence[str] = setting(
        "output", f"Log to {', '.join(REPORTERS)}; may be repeated.", (), kept=False
    )
    log_every: int = setting("output", "Steps between lines of the log.", 1, least=1, kept=False)
    save_every: int = setting("output", "Steps between checkpoints.", 100, least=1)

    def __post_init__(self) -> None:
        rewards = self.reward if is_list(self.reward) else (self.reward,)
        if any(map(callable, rewards)):
            raise ConfigError("Settings(reward=): pass a function to Trainer(reward=)")
        check_fields(self)
        for field in dataclasses.fields(self):
            value = in_any_case(getattr(self, field.name), field.metadata.get("choices", ()))
            object.__setattr__(self, field.name, value)
            if value is not None or field.default is not None:
                _check(field, value)
        check_optimizer(
            self.optimizer, self.state_bits, self.tensor_parallel or 1, self.zero,
            self.expert_parallel or 1,
        )  # fmt: skip
        kind = KINDS[self.kind]
        if kind.constant and self.decay not in (None, kind.decay):
            problem = f"{named(optimizer=self.optimizer)} averages steps of one rate"
            raise ConfigError(f"{problem}; leave {named(decay=self.decay)} out")

    def __repr__(self) -> str:
        """Return the call that makes it, without fields that have their defaults."""
        parts = [
            f"{field.name}={_shown(value)}"
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) is not field.default and value != field.default
        ]
        return one_screen(f"{type(self).__name__}(", parts, ")")

    @property
    def checkpoint(self) -> CheckpointConfig | None:
        """Which blocks are recomputed in the backward pass; None: none."""
        if self.recompute_every is None:
            return None
        every, keep = self.recompute_every, tuple(self.keep)
        return CheckpointConfig(recompute_every=every, keep=keep, offload=self.offload)

    @property
    def kind(self) -> str:
        """The kind of the optimizer, whose averages may have 8 bits."""
        return self.optimizer.removesuffix("8bit")

    @property
    def adapters(self) -> Lora | None:
        """The new adapters to train, if any."""
        if self.lora is None:
            return None
        scale = self.lora_alpha, self.lora_dropout
        return Lora(self.lora, *scale, self.lora_targets, self.rslora, self.dora)

    @property
    def keeps_best(self) -> bool:
        """Whether the run ends with the model of its lowest held-out loss."""
        return self.keep_best or self.patience is not None

    @property
    def learning(self) -> Method:
        """The method, with its options."""
        return METHODS[self.method].bound(self)

    @property
    def precision(self) -> MixedPrecisionConfig:
        """The dtype of the computation, and the loss scale."""
        scale, dynamic = self.loss_scale, self.dynamic_scaling
        return MixedPrecisionConfig(self.dtype or FLOAT, loss_scale=scale, dynamic_scaling=dynamic)

    def check(self, source: Path | None, *, lines: bool) -> None:
        """Raise a ConfigError for settings that exclude each other, the model or the text.

        ``source`` is the folder of the model, None for a new one; ``lines`` says whether each line
        of the text is one of its own.
        """
        if self.pack is not None and not lines:
            both = f"{named(pack=True)} and {named(pack=False)}"
            what = "are for the lines of a .jsonl file and other rows"
            raise ConfigError(f"{both} {what}; leave them out")
        if self.steps is not None and self.epochs is not None:
            both = f"{named('steps')} and {named('epochs')} both say"
            raise ConfigError(f"{both} when to end; leave one out")
        if source is not None and (self.layers or self.hidden or self.vocabulary):
            sizes = f"{named('layers')}, {named('hidden')} and {named('vocabulary')}"
            cure = f"leave them out or leave {named('model')} out"
            raise ConfigError(f"{sizes} describe a new model; {cure}")
        existing = f"is for an existing model; name its {named('model')}"
        if self.lora is not None and source is None:
            raise ConfigError(f"{named('lora')} {existing}")
        self._check_values()
        if source is None and self.method != "sft":
            raise ConfigError(f"{named(method=self.method)} {existing}")
        self.check_method()
        for name in ("base", "new_tokens"):
            if getattr(self, name) is not None and source is None:
                raise ConfigError(f"{named(name)} {existing}")
        if self.new_tokens is not None:
            read_lines(self.new_tokens)
        if self.train_weights and (self.quantize != "ternary" or source is not None):
            problem = f"{named('train_weights')} is for a new model with"
            raise ConfigError(f"{problem} {named(quantize='ternary')}; leave it out")
        if self.quantize is not None and source is None and not self.train_weights:
            raise ConfigError(f"{named('quantize')} {existing}")

    def check_method(self, *, whole: bool = True) -> None:
        """Raise a ConfigError for options that the method does not use, or does not take.

        Without ``whole``, those that it needs may be absent.
        """
        method = METHODS[self.method]
        for name in OPTIONS:
            value = getattr(self, name)
            if value not in (None, ()) and value is not False and name not in method.uses:
                problem = f"{named(method=self.method)} does not use {named(name)}"
                raise ConfigError(f"{problem}; leave it out, or choose {using(name)}")
        if self.loss is not None and self.loss not in method.losses:
            cure = f"choose from {', '.join(method.losses)}"
            raise ConfigError(f"{named(method=self.method)} has no {named(loss=self.loss)}; {cure}")
        self.learning.check_ranks(self)
        if whole:
            self.learning.check(self)

    def _check_values(self) -> None:
        """Raise a ConfigError for values that need others, or another form."""
        if self.warmup >= 1 and self.warmup != int(self.warmup):
            raise ConfigError(
                f"{named(warmup=self.warmup)}: give a whole number, or a share below 1"
            )
        if isinstance(self.eval, int | float) and not 0 < self.eval < 1:
            raise ConfigError(f"{named(eval=self.eval)}: give a file, or a share above 0, below 1")
        if self.min_delta and self.patience is None:
            raise ConfigError(f"{named('min_delta')} is of {named('patience')}; give both")
        usual = {n: v for n, v in Lora(0).settings().items() if n != "lora"}
        changed = {n: getattr(self, n) for n, v in usual.items() if getattr(self, n) != v}
        if self.lora is None and changed:
            cure = f"add {named('lora')}, as in {named(lora=16)}"
            raise ConfigError(f"{named(**changed)} is of new adapters; {cure}")
        self._check_merge()

    def _check_merge(self) -> None:
        """Raise a ConfigError for settings that do not fit a merge that is trained through."""
        if self.merge_into is None:
            if self.merge_from:
                raise ConfigError(f"{named('merge_from')} is of {named('merge_into')}; give both")
            return
        problem: dict[str, Any] = {}
        if self.dora:
            problem = {"dora": True}
        elif self.save_dtype != "float32":
            problem = {"save_dtype": self.save_dtype}
        elif self.merge_from and self.keeps_best:
            problem = {"merge_from": self.merge_from, "keep_best": True}
        elif self.zero == 3:
            problem = {"zero": 3}
        for name in ("tensor_parallel", "pipeline_parallel", "expert_parallel"):
            if (getattr(self, name) or 1) > 1:
                problem = {name: getattr(self, name)}
        if problem:
            why = "the weights of the merged file would not be those of the last step"
            if problem.keys() & {"tensor_parallel", "pipeline_parallel", "expert_parallel", "zero"}:
                why = "ranks would cut the blocks that it rounds"
            cure = f"leave {named(**problem)} out"
            raise ConfigError(f"{named(merge_into=self.merge_into)}: {why}; {cure}")

    def decided(self, *, new: bool, steps: int | None = None) -> "Plan":
        """Return the settings with the defaults of a new model or of an existing one.

        ``steps`` are those of the epochs, when the text is known.
        """
        ends = steps or self.steps or STEPS
        whole, adapted = METHODS[self.method].rates or (RATE, ADAPTER_RATE)
        rate = NEW_RATE if new else whole if self.lora is None else adapted
        share = KINDS[self.kind].rates[self.lora is not None]
        defaults = {
            "steps": ends,
            "lr": self.lr or rate * share,
            "decay": self.decay or KINDS[self.kind].decay,
            "tokens": self.tokens or TOKENS,
            "dtype": self.dtype or FLOAT,
            "evaluate_every": self.evaluate_every or math.ceil(ends / EVALUATIONS),
            "state_bits": 8 if self.optimizer == SMALL else self.state_bits,
            "data_seed": self.seed if self.data_seed is None else self.data_seed,
            "quantize": None if self.train_weights else self.quantize,  # of frozen weights
        }
        return Plan(**vars(self) | defaults)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Plan(Settings, Arguments):
    """Settings with the defaults that depend on model and text: see ``Settings.decided``."""

    steps: int = dataclasses.field()
    lr: float = dataclasses.field()
    decay: str = dataclasses.field()
    data_seed: int = dataclasses.field()
    tokens: int = dataclasses.field()
    dtype: str = dataclasses.field()
    evaluate_every: int = dataclasses.field()
    __getattr__ = Arguments.__getattr__  # before that of Settings


def check_optimizer(
    optimizer: str, state_bits: int, tensor_parallel: int, zero: int, expert_parallel: int = 1
) -> None:
    """Raise a ConfigError for settings that an optimizer cannot be combined with."""
    problem = conflict(
        optimizer, state_bits=state_bits, tensor_parallel=tensor_parallel, zero=zero,
        expert_parallel=expert_parallel,
    )  # fmt: skip
    if problem is not None:
        settings, why = problem
        cure = f"leave {named(**settings)} out, or give {named(optimizer='adamw')}"
        raise ConfigError(f"{named(optimizer=optimizer)}: {why}; {cure}")


def _shown(value: Any) -> str:
    """Return a value as it is written in a call; of data their name, and not all rows."""
    if isinstance(value, Records | Text):
        return f"<{type(value).__name__} {value.name}>"
    return repr(str(value) if isinstance(value, Path) else value)


def kind_of(field: "dataclasses.Field[Any]") -> Any:
    """Return the type of a setting's values, other than None."""
    return next(iter(get_args(field.type)), field.type)


def _check(field: "dataclasses.Field[Any]", value: Any) -> None:
    """Raise a ConfigError for a value that is out of range or no choice."""
    kind, limits, shown = kind_of(field), field.metadata, named(**{field.name: value})
    if "choices" in limits and not (isinstance(value, int | str) and value in limits["choices"]):
        raise ConfigError(
            f"{shown} is not known; choose from {', '.join(map(str, limits['choices']))}"
        )
    if "least" in limits or "above" in limits:
        least, above = limits.get("least", -math.inf), limits.get("above", -math.inf)
        right = is_integer(value, least) if kind is int else is_number(value)
        below = limits.get("below", 2**63 if kind is int else math.inf)
        if not (right and least <= value < below and value > above):
            what = "a whole number" if kind is int else "a number"
            bound = f"of {least} or more" if "least" in limits else f"above {above}"
            bound += f", below {below}" * ("below" in limits)
            raise ConfigError(f"{shown}: give {what} {bound}")
