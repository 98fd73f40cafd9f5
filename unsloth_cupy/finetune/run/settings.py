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
from ...parallel.communicator import TIMEOUT
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

STEPS = 1200  # default for a new model
TOKENS = 128  # default length of a row of running text
NEW_RATE, RATE, ADAPTER_RATE = 4e-3, 1e-4, 1e-3  # defaults: new model, existing, adapters
EVALUATIONS = 10  # default number of evaluations in a run
SMALL = "adamw8bit"  # adamw with state_bits=8
NAMES = ("adamw", SMALL, *[name for name in KINDS if name != "adamw"])
DEVICES = "auto, cpu, cuda or cuda:1; auto uses a GPU if one is available."
DTYPES = FLOAT, *HALVES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Settings(Options):
    """The settings of a run.

    ``unsloth-cupy finetune --help-all`` describes the fields that are also options.

    Attributes
    ----------
    trained_tokens : sequence of int
        Tokens whose rows in the embedding and in the head are trained, in addition to adapters.
    loss_scale : float
        With float16: the initial loss scale.
    dynamic_scaling : bool
        Whether the loss scale shrinks when gradients overflow, and grows after many good steps.
    keep : sequence of str
        With ``recompute_every``: ops whose results are stored instead of recomputed.

    Raises
    ------
    ConfigError
        A value has the wrong type, is out of range, or is not one of the choices; the message names
        the field.
    """

    CALL: ClassVar[str] = "Settings"
    pack: bool | None = setting(
        "data", "Pack several examples into a row.  [default: {pack}]", kept=False
    )
    batch: int = setting("data", "Batch size in rows.", 4, least=1)
    tokens: int | None = setting(
        "data",
        "Maximum length of a row in tokens.  [default: length of the longest example, excluding"
        f" outliers; {TOKENS} for running text]",
        least=2,
    )

    layers: int | None = setting(
        "model",
        f"Number of layers of a new model.  [default: {SIZES['layers']}]",
        least=1,
        kept=False,
    )
    hidden: int | None = setting(
        "model", f"Hidden size of a new model.  [default: {SIZES['hidden']}]", least=1, kept=False
    )
    vocabulary: int | None = setting(
        "model",
        f"Vocabulary size of a new tokenizer.  [default: {SIZES['vocabulary']}]",
        least=1,
        kept=False,
    )
    train_weights: bool = setting(
        "model",
        "Train all weights of a new model, and round them to ternary values in every forward pass;"
        " requires {quantize} ternary.",
        False,
        kept=False,
        rare=True,
    )
    new_tokens: str | Path | None = setting(  # noqa: RUF009 -- a field
        "model", "File of tokens to add to an existing model, one per line.", kept=False
    )
    trained_tokens: Sequence[int] = dataclasses.field(default=(), metadata={"kept": False})
    device: str | None = setting("model", DEVICES, "auto", kept=False)

    lora: int | None = setting(
        "adapters", "LoRA rank: train adapters of this rank and freeze the model.", least=1
    )
    lora_alpha: float | None = setting(
        "adapters", "LoRA alpha: adapters are scaled by alpha / rank.  [default: 2 * rank]", above=0
    )
    lora_dropout: float = setting(
        "adapters", "Dropout probability of the adapters' inputs.", 0.0, least=0, below=1
    )
    lora_targets: str | Sequence[str] = setting(
        "adapters", "Layers to adapt: all, attention, or names such as q_proj,v_proj.", ALL
    )
    rslora: bool = setting(
        "adapters", "Scale adapters by alpha / sqrt(rank) (rsLoRA).", False, rare=True
    )
    dora: bool = setting("adapters", "Also train the norm of each weight row (DoRA).", False)
    base: str | Path | None = setting(  # noqa: RUF009 -- a field
        "adapters", "Folder of the adapter's base model, if the base model was moved.", kept=False
    )
    quantize: str | None = setting(
        "adapters",
        "Quantize the weights, for example to nf4, and freeze them; requires {lora}.  For a new"
        " model with ternary weights, pass {train_weights} in place of {lora}: see --help-all.",
        choices=QUANTIZED,
    )
    merge_into: str | None = setting(
        "adapters",
        "Type of the quantized file into which the adapter will be merged, such as nf4 or q4_0."
        "  Training then computes with the weights as this file will store them.",
        choices=CHOICES,
    )
    merge_from: int = setting(
        "adapters",
        "Number of steps before the quantization of {merge_into} starts.",
        0,
        least=0,
        rare=True,
    )

    steps: int | None = setting(
        "training",
        "Number of optimizer steps.  [default: 1 to 3 epochs, as many as fit in 1000 steps;"
        f" {STEPS} steps for a new model]",
        least=1,
    )
    epochs: float | None = setting(
        "training", "Number of passes through the data, in place of {steps}.", above=0, kept=False
    )
    lr: float | None = setting(
        "training",
        "Peak learning rate.  [default: depends on model, method and optimizer]",
        above=0,
    )
    embedding_lr: float | None = setting(
        "training",
        "Peak learning rate of the embedding and the head, if trained.  [default: {lr}]",
        above=0,
        rare=True,
    )
    warmup: float = setting(
        "training",
        "Warmup steps; a value below 1 is a fraction of all steps.",
        0.05,
        least=0,
    )
    decay: str | None = setting(
        "training",
        "Learning rate schedule after warmup.  [default: cosine; constant for schedulefree]",
        choices=(*DECAYS,),
    )  # fmt: skip
    optimizer: str = setting(
        "training",
        "Optimizer.  adamw8bit stores its states in 8 bits.  With muon, Muon trains the"
        " linear layers of the blocks, and AdamW trains all other parameters.",
        "adamw", choices=NAMES,
    )  # fmt: skip
    weight_decay: float = setting(
        "training",
        "Weight decay, as in AdamW: each step multiplies weights by 1 - learning rate * decay.",
        0.1,
        least=0,
    )
    decay_all: bool = setting(
        "training", "Also apply weight decay to norms, biases and embeddings.", False, rare=True
    )
    max_norm: float = setting(
        "training", "Maximum gradient norm (gradient clipping).", 1.0, above=0
    )
    accumulate: int = setting(
        "training", "Gradient accumulation: number of batches per step.", 1, least=1
    )
    dtype: str | None = setting(
        "training", "Compute dtype; trained weights stay float32.  [default: float32 on a CPU; on a"
        " GPU the model's dtype if it has 16 bits, else bfloat16; a resumed run keeps its dtype]",
        choices=DTYPES,
    )  # fmt: skip
    seed: int = setting(
        "training", "Random seed of new weights, data order and samples.", 0, least=0
    )
    data_seed: int | None = setting(
        "training", "Random seed of the data order.  [default: {seed}]", least=0, rare=True
    )
    neftune: float = setting(
        "training",
        "Scale of the noise that is added to embeddings (NEFTune), for example 5.",
        0.0,
        least=0,
        rare=True,
    )
    router_bias_update_rate: float = setting(
        "training",
        "Per step, raise a router's bias by this much for each expert with fewer tokens than the"
        " mean, and lower it for each with more (DeepSeek-V3 uses 0.001).",
        0.0,
        least=0,
        rare=True,
    )
    mtp_weight: float = setting(
        "training",
        "Weight of the loss of draft heads (multi-token prediction), such as 0.1; 0 saves them as"
        " they are.",
        0.0,
        least=0,
        rare=True,
    )
    graph: bool | None = setting(
        "training",
        "On a GPU, replay steps as CUDA graphs.  [default: yes, except for a custom objective]",
        kept=False,
        rare=True,
    )
    find_nan: bool = setting(
        "training",
        "Report the first layer that produces a NaN; slower.",
        False,
        kept=False,
        rare=True,
    )
    loss_scale: float = 65536.0
    dynamic_scaling: bool = True

    eval: str | Path | float | Records | Text | None = setting(  # noqa: RUF009 -- a field
        "evaluation",
        "Evaluation file, or the fraction of the data to hold out, such as 0.05.  [default: 0.1]",
        kept=False,
    )
    evaluate_every: int | None = setting(
        "evaluation", "Steps between evaluations.  [default: a tenth of all steps]", least=1
    )
    patience: int | None = setting(
        "evaluation",
        "Stop after this many evaluations in a row without a lower evaluation loss.",
        least=1,
        kept=False,
    )
    min_delta: float = setting(
        "evaluation",
        "Smallest decrease of the evaluation loss, in nats, that {patience} counts.",
        0.0,
        least=0,
        kept=False,
        rare=True,
    )
    keep_best: bool = setting(
        "evaluation",
        "At the end, save the model of the step with the lowest evaluation loss; {patience}"
        " implies this option.",
        False,
        kept=False,
    )
    sample_prompt: Sequence[str] = setting(
        "evaluation",
        "Prompt to continue at each evaluation; may be repeated.",
        (),
        kept=False,
        rare=True,
    )

    recompute_every: int | None = setting(
        "memory",
        "Gradient checkpointing: store only the input of every Nth block; saves memory.",
        least=1,
    )
    keep: Sequence[str] = ()
    offload: bool | None = setting(
        "memory",
        "Store the inputs of recomputed blocks in host memory.  [default: only if"
        " {recompute_every} is set and a step does not fit into GPU memory otherwise]",
        rare=True,
    )
    host_memory: int | None = setting(
        "memory",
        "Limit on the host memory that {offload} uses in all ranks of a machine, for example 64GiB."
        "  [default: 80 % of the free memory]",
        least=1,
        kept=False,
        rare=True,
    )
    chunked_mlp: bool | None = setting(
        "memory",
        "Compute MLPs and experts in chunks of tokens, and recompute them in the backward pass;"
        " saves memory.  [default: in recomputed blocks with more tokens than one chunk, and if a"
        " step does not fit into GPU memory otherwise]",
        rare=True,
    )
    state_bits: int = setting(
        "memory",
        "Bits per value of the optimizer states.",
        32,
        choices=(32, 8),
        rare=True,  # as --optimizer adamw8bit
    )
    limit_memory: int | None = setting(
        "memory",
        "Limit on the memory of arrays, for example 2GiB; checked before training; not supported"
        " on several ranks.",
        least=1,
        kept=False,
    )

    tensor_parallel: int | None = setting(
        "ranks", "Number of ranks that split each weight.", least=1, kept=False
    )
    pipeline_parallel: int | None = setting(
        "ranks", "Number of ranks that split the layers.", least=1, kept=False
    )
    pipeline_schedule: str | None = setting(
        "ranks", "Pipeline schedule.  [default: 1f1b]", choices=(*SCHEDULES,), kept=False, rare=True
    )
    chunks: int | None = setting(
        "ranks",
        "Number of model parts per stage in the interleaved schedule.  [default: 2]",
        least=1,
        kept=False,
        rare=True,
    )
    data_parallel: int | None = setting(
        "ranks", "Number of ranks that split the rows of a batch.", least=1, kept=False
    )
    context_parallel: int | None = setting(
        "ranks", "Number of ranks that split the tokens of each row.", least=1, kept=False
    )
    expert_parallel: int | None = setting(
        "ranks",
        "Number of ranks that split the experts and the rows of a batch.",
        least=1,
        kept=False,
    )
    context_attention: str | None = setting(
        "ranks",
        "Attention across context ranks; ulysses splits heads.  [default: ring]",
        choices=(*CONTEXTS,),
        kept=False,
        rare=True,
    )
    zero: int = setting(
        "ranks", "ZeRO stage: 1 splits optimizer states over data ranks; 3 also splits weights.", 0,
        choices=(0, 1, 3), kept=False,
    )  # fmt: skip
    timeout: float = setting(
        "ranks", "Seconds to wait for another rank; then the run ends on all ranks.", TIMEOUT,
        above=0, kept=False, rare=True,
    )  # fmt: skip

    out: str | Path | None = setting(  # noqa: RUF009 -- a field
        "output", "Folder of the run.  [default: runs/MODEL-DATA]", kept=False
    )
    save_dtype: str = setting(
        "output", "Dtype of the weights saved at the end.", "float32", choices=DTYPES, kept=False
    )
    report_to: Sequence[str] = setting(
        "output",
        f"Logger that also receives the log: {', '.join(REPORTERS)}; may be repeated.",
        (),
        kept=False,
    )
    log_every: int = setting("output", "Steps between lines of the log.", 1, least=1, kept=False)
    save_every: int = setting("output", "Steps between checkpoints.", 100, least=1)

    def __post_init__(self) -> None:
        rewards = self.reward if is_list(self.reward) else (self.reward,)
        if any(map(callable, rewards)):
            raise ConfigError("Settings(reward=): pass a function to Trainer(reward=)")
        if callable(self.environment):
            raise ConfigError("Settings(environment=): pass a class to Trainer(environment=)")
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
            why = "averages steps, which requires a constant learning rate"
            problem = f"{named(optimizer=self.optimizer)} {why}"
            raise ConfigError(f"{problem}; leave {named(decay=self.decay)} out")

    def __repr__(self) -> str:
        """Return the constructor call, without fields that have their defaults."""
        parts = [
            f"{field.name}={_shown(value)}"
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) is not field.default and value != field.default
        ]
        return one_screen(f"{type(self).__name__}(", parts, ")")

    @property
    def checkpoint(self) -> CheckpointConfig | None:
        """The settings of gradient checkpointing; None: nothing is recomputed."""
        if self.recompute_every is None:
            return None
        every, keep = self.recompute_every, tuple(self.keep)
        return CheckpointConfig(recompute_every=every, keep=keep, offload=bool(self.offload))

    @property
    def kind(self) -> str:
        """The kind of the optimizer: its name without "8bit"."""
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
        """Whether the saved model is the model of the best step."""
        return self.keep_best or self.patience is not None

    @property
    def by_text(self) -> bool:
        """Whether each text of a step is computed alone, and texts are added in one order.

        So results depend neither on the number of ranks nor on ``accumulate``.
        """
        return self.invariant and self.method == "sft"

    @property
    def learning(self) -> Method:
        """The method with its options."""
        return METHODS[self.method].bound(self)

    @property
    def precision(self) -> MixedPrecisionConfig:
        """The compute dtype and the loss scale."""
        scale, dynamic = self.loss_scale, self.dynamic_scaling
        return MixedPrecisionConfig(self.dtype or FLOAT, loss_scale=scale, dynamic_scaling=dynamic)

    def check(self, source: Path | None, *, lines: bool) -> None:
        """Raise a ConfigError for settings that conflict with each other, the model or the data.

        ``source`` is the folder of the model, None for a new model.  ``lines`` is whether the data
        are rows rather than running text.
        """
        if self.pack is not None and not lines:
            both = f"{named(pack=True)} and {named(pack=False)}"
            what = "apply only to data in rows, such as a .jsonl file"
            raise ConfigError(f"{both} {what}; leave them out")
        if self.steps is not None and self.epochs is not None:
            both = f"{named('steps')} and {named('epochs')} both set"
            raise ConfigError(f"{both} the length of the run; leave one out")
        if source is not None and (self.layers or self.hidden or self.vocabulary):
            sizes = f"{named('layers')}, {named('hidden')} and {named('vocabulary')}"
            cure = f"leave them out or leave {named('model')} out"
            raise ConfigError(f"{sizes} describe a new model; {cure}")
        existing = f"requires an existing model; pass {named('model')}"
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
        """Raise a ConfigError for options that the method does not use or support.

        With ``whole``, also raise for missing options that the method requires.
        """
        method = METHODS[self.method]
        defaults = {each.name: each.default for each in dataclasses.fields(self)}
        for name in OPTIONS:
            value = getattr(self, name)
            if value not in (None, (), defaults[name]) and name not in method.uses:
                problem = f"{named(method=self.method)} does not use {named(name)}"
                raise ConfigError(f"{problem}; leave it out, or choose {using(name)}")
        if self.loss is not None and self.loss not in method.losses:
            cure = f"choose from {', '.join(method.losses)}"
            raise ConfigError(f"{named(method=self.method)} has no {named(loss=self.loss)}; {cure}")
        self.learning.check_ranks(self)
        if whole:
            self.learning.check(self)

    def _check_values(self) -> None:
        """Raise a ConfigError for values that are invalid, or require another setting."""
        if self.warmup >= 1 and self.warmup != int(self.warmup):
            raise ConfigError(
                f"{named(warmup=self.warmup)}: pass a whole number, or a fraction below 1"
            )
        if isinstance(self.eval, int | float) and not 0 < self.eval < 1:
            raise ConfigError(
                f"{named(eval=self.eval)}: pass a file, or a fraction between 0 and 1"
            )
        if self.min_delta and self.patience is None:
            raise ConfigError(f"{named('min_delta')} requires {named('patience')}; give both")
        usual = {n: v for n, v in Lora(0).settings().items() if n != "lora"}
        changed = {n: getattr(self, n) for n, v in usual.items() if getattr(self, n) != v}
        if self.lora is None and changed:
            cure = f"add {named('lora')}, as in {named(lora=16)}"
            raise ConfigError(f"{named(**changed)} applies to new adapters only; {cure}")
        if self.offload and self.recompute_every is None:
            cure = f"add {named(recompute_every=1)}"
            problem = "moves the inputs of recomputed blocks, and none is recomputed"
            raise ConfigError(f"{named(offload=True)} {problem}; {cure}")
        if self.mtp_weight:
            self._check_draft_heads()
        self._check_merge()

    def _check_draft_heads(self) -> None:
        """Raise a ConfigError for settings with which draft heads are not trained."""
        cure = f"leave {named(mtp_weight=self.mtp_weight)} out: heads are saved as they are"
        other: dict[str, Any] = {}
        if self.method != "sft":
            other = {"method": self.method}
        elif self.lora is not None:
            other = {"lora": self.lora}
        elif self.invariant:
            other = {"invariant": True}
        for name in ("tensor_parallel", "pipeline_parallel", "expert_parallel", "context_parallel"):
            if (getattr(self, name) or 1) > 1:
                other = {name: getattr(self, name)}
        if other:
            what = f"draft heads are not trained with {named(**other)}"
            raise ConfigError(f"{named(mtp_weight=self.mtp_weight)}: {what}; {cure}")

    def _check_merge(self) -> None:
        """Raise a ConfigError for settings that conflict with ``merge_into``."""
        if self.merge_into is None:
            if self.merge_from:
                raise ConfigError(
                    f"{named('merge_from')} requires {named('merge_into')}; give both"
                )
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
            why = "the merged file would not hold the weights of the last step"
            if problem.keys() & {"tensor_parallel", "pipeline_parallel", "expert_parallel", "zero"}:
                why = "ranks would split the quantization blocks of the merged file"
            cure = f"leave {named(**problem)} out"
            raise ConfigError(f"{named(merge_into=self.merge_into)}: {why}; {cure}")

    def decided(self, *, new: bool, steps: int | None = None) -> "Plan":
        """Return the settings with the defaults of a new or an existing model.

        ``steps`` is the number of steps in ``epochs``, known once the data are read.
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
    """Settings with all defaults that depend on model and data: see ``Settings.decided``."""

    steps: int = dataclasses.field()
    lr: float = dataclasses.field()
    decay: str = dataclasses.field()
    data_seed: int = dataclasses.field()
    tokens: int = dataclasses.field()
    dtype: str = dataclasses.field()
    evaluate_every: int = dataclasses.field()
    __getattr__ = Arguments.__getattr__  # not the one of Settings


def check_optimizer(
    optimizer: str, state_bits: int, tensor_parallel: int, zero: int, expert_parallel: int = 1
) -> None:
    """Raise a ConfigError for settings that an optimizer does not support."""
    problem = conflict(
        optimizer, state_bits=state_bits, tensor_parallel=tensor_parallel, zero=zero,
        expert_parallel=expert_parallel,
    )  # fmt: skip
    if problem is not None:
        settings, why = problem
        cure = f"leave {named(**settings)} out, or give {named(optimizer='adamw')}"
        raise ConfigError(f"{named(optimizer=optimizer)}: {why}; {cure}")


def _shown(value: Any) -> str:
    """Return a value in the syntax of Python; data only by name, without rows."""
    if isinstance(value, Records | Text):
        return f"<{type(value).__name__} {value.name}>"
    return repr(str(value) if isinstance(value, Path) else value)


def kind_of(field: "dataclasses.Field[Any]") -> Any:
    """Return the type of a setting, without None."""
    return next(iter(get_args(field.type)), field.type)


def _check(field: "dataclasses.Field[Any]", value: Any) -> None:
    """Raise a ConfigError for a value that is out of range or not a choice."""
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
