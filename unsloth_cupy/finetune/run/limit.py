"""Checks the planned memory of a run against a limit, and measures it during training."""

import dataclasses
import importlib
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from ...errors import ConfigError, DeviceMemoryError
from ...machine import device_memory, format_bytes
from ...memory.ledger import MemoryPlan
from ...memory.plan import plan_memory
from ...memory.planned_model import new_adapter
from ...memory.pool import memory_pool
from ...models.objective import Objective, next_token
from ...models.quantizer import KINDS
from ...training.gradients import sums_held
from ..data.text import TrainingData, texts_of
from ..listener import announce
from ..methods.method import Method
from ..naming import named
from .executor import planned_with_noise

if TYPE_CHECKING:
    from ...models.adapters.adapter import Adapter
    from ...models.configs.config import Config
    from .settings import Plan

# Steps measured without a limit: all steps need the same memory, and counting slows small ops.
COUNTED = 2
TOKENS = 2048  # default length of a row, if the model has as many positions
PINNED = 0.8  # part of the host's free memory that offload may use: other programs need some
# changes of settings that save memory
ADAPTERS: Mapping[str, Any] = {"lora": 8}
CHUNKED: Mapping[str, Any] = {"chunked_mlp": True}


class Sizes(NamedTuple):
    """The properties of a run that a memory plan depends on."""

    config: "Config"
    batch: int
    tokens: int
    device: str | None
    exists: bool  # adapters may be proposed: False for new models and BitNet layers
    adapter: "Adapter | None" = None  # the adapter in the model
    quantized: str | None = None  # the quantization of the weights
    objective: Objective = next_token
    inputs: Sequence[Mapping[str, Any]] = ()  # inputs of the passes of a step; empty: full rows
    beside: int = 1  # ranks on this machine, which share the memory of the host
    whole: bool = True  # a rank holds all weights, so that its memory is that of one device
    texts: int = 1  # texts of a step, if each text is a pass of its own

    def planned(self, plan: "Plan", **changes: Any) -> MemoryPlan:
        """Return the memory plan of a step, with some settings changed."""
        inputs = () if {"batch", "tokens", "accumulate"} & changes.keys() else self.inputs
        options: dict[str, Any] = {
            "batch": self.batch,
            "tokens": self.tokens,
            "dtype": plan.dtype,
            "optimizer": plan.kind,
            "state_bits": plan.state_bits,
            "adapter": self.adapter,
            "quantization": self.quantized,
            "recompute_every": plan.checkpoint or plan.recompute_every,
            "accumulate": self.texts if plan.by_text else plan.accumulate,
            "halves": plan.by_text,
            "chunked_mlp": plan.chunked_mlp,
            "device": "cpu" if self.device is None else "cuda",
            "objective": _noisy(self.objective) if plan.neftune else self.objective,
            "inputs": inputs,
            "merge_into": plan.merge_into,
            "mtp_weight": plan.mtp_weight,
        }
        if self.adapter is None and plan.adapters is not None and "lora" not in changes:
            planned = new_adapter(
                self.config, **plan.adapters.options(self.config, plan.trained_tokens)
            )
            options |= {"rank": None, "adapter": planned}
        options |= {"rank" if name == "lora" else name: value for name, value in changes.items()}
        return plan_memory(self.config, **options)


def passes_of(
    data: TrainingData, step: int, accumulate: int, method: Method, *, padded: bool
) -> list[dict[str, Any]]:
    """Return the inputs of a plan of a step: its first batch, and the largest other batch.

    ``padded``: with the padding of CUDA graphs.
    """
    numbers = range(step * accumulate, (step + 1) * accumulate)
    first, *others = (data.batches.at(number) for number in numbers)
    chosen = [first, max(others, key=lambda batch: batch.tokens.size)] if others else [first]
    return [method.inputs(method.padded(batch) if padded else batch) for batch in chosen]


def texts_by_sums(data: TrainingData, step: int, method: Method) -> list[dict[str, Any]]:
    """Return the longest text of a step for each number of sums that memory holds beside it."""
    texts = texts_of(data.batches.at(step))
    longest: dict[int, Any] = {}
    for held, text in zip(sums_held(len(texts)), texts, strict=True):
        longest[held] = max(longest.get(held, text), text, key=lambda each: each.tokens.size)
    return [method.inputs(longest[held]) for held in sorted(longest)]


def tokens_of(tokens: int | None, positions: int) -> int:
    """Return the length of a row; by default 2048, or all positions of the model if fewer."""
    if tokens is None:
        return min(TOKENS, positions)
    check_tokens(tokens, positions)
    return tokens


def check_tokens(tokens: int, positions: int, model: str = "the model") -> None:
    """Warn if rows are longer than the positions of a model: rotary angles go on beyond them."""
    if tokens > positions:
        warnings.warn(
            f"{named(tokens=tokens)} exceeds the {positions} positions that {model} was trained for"
            " (max_position_embeddings); later positions need training, or a rope_scaling in"
            " config.json",
            stacklevel=2,
        )


def quantized_kind(
    source: Any, quantize: str | None, lora: int | None, adapter: Any, stored: str | None
) -> str | None:
    """Return the quantization of the model's weights; raise if nothing could be trained."""
    anew = stored is not None and not KINDS[stored].in_folders
    if quantize is not None and stored is not None and not anew:
        cure = f"leave {named('quantize')} out"
        raise ConfigError(f"{source} is quantized already, as {stored}; {cure}")
    kind = quantize or stored
    if kind is not None and adapter is None and lora is None:
        why = named("quantize") if stored is None else f"{source} is quantized, which"
        cure = f"add {named('lora')}, as in {named(lora=16)}"
        raise ConfigError(f"{why} freezes the weights: {cure}")
    return kind


def with_savings(sizes: Sizes, plan: "Plan") -> "Plan":
    """Return the settings with chunked MLPs or offload, if a step does not fit the GPU without."""
    if plan.offload and sizes.device is None:
        announce(
            f"{named(offload=True)} has no effect on the CPU: its arrays are in host memory already"
        )
    if not sizes.whole:
        return plan
    changes: list[dict[str, Any]] = [{"chunked_mlp": True}] * (plan.chunked_mlp is None)
    if plan.offload is None and plan.recompute_every is not None:
        changes += [{"offload": True}, *({**each, "offload": True} for each in changes)]
    if not changes or sizes.device is None or plan.limit_memory is not None:
        return plan
    whole, _ = device_memory(sizes.device)
    if whole is None or not sizes.planned(plan).beyond(whole):
        return plan
    for change in changes:
        step_plan = sizes.planned(changed := dataclasses.replace(plan, **change))
        host = step_plan.host
        usable = for_offload(plan.host_memory, sizes.beside) if host else 0
        if not step_plan.beyond(whole) and host <= usable:
            needed = f"; the offloaded inputs of blocks need {format_bytes(host)} of host memory"
            message = f"because otherwise a step does not fit into the {format_bytes(whole)} of"
            announce(f"using {named(**change)}, {message} the GPU{needed * bool(host)}")
            return changed
    return plan


def for_offload(limit: int | None, ranks: int = 1) -> int:
    """Return the bytes of host memory that one of the ranks of a machine may use for offload.

    Unknown memory is no limit.
    """
    if limit is None:
        whole, free = device_memory(None)
        known = whole if free is None else free
        limit = sys.maxsize if known is None else round(PINNED * known)
    return limit // ranks


def checked_plan(sizes: Sizes, plan: "Plan", limit: int | None) -> MemoryPlan:
    """Return the memory plan of a step; raise if it exceeds the limit.

    The error names the first op that does not fit, and settings that save memory.  Without a limit,
    the plan is compared with the memory of the device.

    Raises
    ------
    DeviceMemoryError
        ``required`` is the peak of a step, ``available`` the limit.
    """
    step_plan = sizes.planned(plan)
    if step_plan.host and step_plan.host > (host := for_offload(plan.host_memory, sizes.beside)):
        needed = f"the offloaded inputs of blocks need {format_bytes(step_plan.host)} of host"
        needed += " memory" + " in each rank" * (sizes.beside > 1)
        needed += f", but only {format_bytes(host)} may be used"
        cure = f"leave {named('offload')} out, use shorter rows, or raise {named('host_memory')}"
        raise DeviceMemoryError(f"{named(offload=True)}: {needed}; {cure}", step_plan.host, host)
    if not sizes.whole:  # ranks divide what this plan counts
        return step_plan
    whole, free = device_memory(sizes.device) if limit is None else (limit, limit)
    first = None if whole is None else step_plan.beyond(whole)
    if whole is None or first is None:
        if free is not None and step_plan.total > free:
            message = (
                f"a step needs {format_bytes(step_plan.total)}, but only {format_bytes(free)} of"
            )
            announce(f"{message} {format_bytes(whole or 0)} are free now")
        return step_plan
    held = sorted(first.held.items(), key=lambda item: -item[1])
    listed = ", ".join(f"{part} {format_bytes(size)}" for part, size in held if size)
    peak, over = f"{format_bytes(step_plan.total)} at its peak", format_bytes(first.total - whole)
    device = f"{named(device=sizes.device or 'cpu')} has"
    where = device if limit is None else named("limit_memory")
    enough = round(step_plan.total / 2**20 * 1.02) * 2**20  # plans are exact to 2 %
    raised = named(limit_memory=enough)
    raised += " tries anyway" if limit is None else " would be enough"
    cures = _cures(sizes, plan, step_plan, whole)
    if limit is None and sizes.device is not None and sizes.exists and sizes.beside == 1:
        flag = named(fit=True)  # in Python, a function
        flag = flag if flag.startswith("--") else "unsloth_cupy.fit()"
        cures = f"{flag} chooses settings that fit{'; ' * bool(cures)}{cures}"
    raise DeviceMemoryError(
        f"{where} {format_bytes(whole)}: a step needs {peak},"
        f" in {step_plan.moments[step_plan.peak]}; {first} is the first op that does not fit,"
        f" by {over}"
        f" (in use: {listed}). {cures}{'; ' * bool(cures)}{raised}",
        step_plan.total,
        whole,
    )


def _noisy(objective: Objective) -> Objective:
    """Return an objective with noise, also for a method with a planned teacher."""
    noisy: Any = partial(planned_with_noise, objective)
    if isinstance(objective, Method):
        noisy.full = objective.full
    with_teacher = getattr(objective, "planned", None)
    if with_teacher is not None:
        noisy.planned = lambda frozen: partial(planned_with_noise, with_teacher(frozen))
    return noisy


def _cures(sizes: Sizes, plan: "Plan", step_plan: MemoryPlan, limit: int) -> str:
    """Return in words what each change would save, largest first; and all changes together.

    All changes together are listed only if no single change is enough.
    """
    changes: list[Mapping[str, Any]] = []
    if plan.recompute_every != 1:
        changes.append({"recompute_every": 1})
    elif not plan.offload and sizes.device is not None and plan.limit_memory is None:
        changes.append({"offload": True})
    if plan.dtype == "float32":
        changes.append({"dtype": "bfloat16"})
    if sizes.batch > 1:
        changes.append({"batch": -(-sizes.batch // 2), "accumulate": 2 * plan.accumulate})
    if sizes.tokens > 2:
        changes.append({"tokens": sizes.tokens // 2})
    if plan.state_bits == 32 and plan.kind == "adamw":
        changes.append({"state_bits": 8})
    adapted = plan.lora is not None or sizes.adapter is not None
    if not plan.chunked_mlp:
        changes.append(CHUNKED)
    if sizes.exists and not adapted:
        changes.append(ADAPTERS)
    totals = [(sizes.planned(plan, **change).total, named(**change), change) for change in changes]
    useful = sorted((each for each in totals if each[0] < step_plan.total), key=itemgetter(0, 1))
    if useful and useful[0][0] > limit:  # no change alone is enough
        chosen = [change for _, _, change in useful]
        together: dict[str, Any] = {}
        for change in chosen:
            together |= change
        most = sizes.planned(plan, **together).total
        # together they may save less than one alone
        useful += [(most, named(**together), together)] * (most < useful[0][0])
    savings = [
        f"{words} saves {format_bytes(step_plan.total - total)}" + " and fits" * (total <= limit)
        for total, words, _ in useful
    ]
    return "; ".join(savings)


class Memory:
    """Measures the array memory of steps.

    With a limit, all steps are measured; else the first steps and the largest step.  ``planned`` is
    the plan of the largest step, ``largest`` its number; ``bytes_of`` returns the planned bytes of
    another step.
    """

    def __init__(
        self,
        planned: MemoryPlan,
        limit: int | None,
        device: str | None,
        *,
        counts: bool = True,
        largest: int = 0,
        bytes_of: Callable[[int], int] | None = None,
    ) -> None:
        self.planned, self.limit, self.device = planned, limit, device
        self.largest, self.bytes_of = largest, bytes_of
        self.counts, self.left = counts, COUNTED if counts else 0
        self.step = self.planned_steps = 0

    @contextmanager
    def watched(self, arrays: Iterable[Any]) -> Iterator[None]:
        """Measure inside a ``with`` block; ``arrays`` are the arrays in memory before it."""
        if not self.counts:
            yield
            return
        if self.device is None:  # import modules of the first step now, so that they do not count
            importlib.import_module("scipy.sparse")
            importlib.import_module("scipy.special")
        self.held = [*arrays]
        with ExitStack() as self.stack:
            self._open()
            yield

    def _open(self) -> None:
        number = None if self.device is None else int(self.device.partition(":")[2] or 0)
        self.pool = memory_pool(self.limit, number, held=self.held)
        self.stack.enter_context(self.pool)

    def begin_step(self, step: int = 0) -> bool:
        """Reset the peak; return whether measuring makes this step slower than others."""
        self.step = step
        if self.counts and not self.left and step == self.largest:
            self.left = 1
            self._open()
        if self.left:
            self.pool.reset_peak()
        return bool(self.left) and self.limit is None and self.device is None

    def end_step(self) -> dict[str, int]:
        """Return the planned and the measured peak of a step, for its line of the log.

        Steps other than the largest are planned only if they are among the first.
        """
        if not self.left:
            return {}
        line = {"planned_bytes": self.planned.total, "peak_bytes": self.pool.peak}
        if self.bytes_of is not None and self.step != self.largest:
            self.planned_steps += 1
            if self.planned_steps > COUNTED:
                del line["planned_bytes"]
            else:
                line["planned_bytes"] = self.bytes_of(self.step)
        self.left -= self.limit is None
        if not self.left:
            self.stack.close()
        return line
