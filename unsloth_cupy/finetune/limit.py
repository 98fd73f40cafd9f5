"""What a fine-tune takes, held against the memory that it may take."""

import importlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from ..errors import ConfigError, DeviceMemoryError
from ..machine import device_memory, format_bytes
from ..memory.ledger import MemoryPlan
from ..memory.plan import plan_memory
from ..memory.pool import memory_pool

if TYPE_CHECKING:
    from ..models.adapter import Adapter
    from ..models.config import Config
    from .settings import Settings

COUNTED = 2  # steps without a limit: they take alike, and to count slows small ops down
ADAPTER_RANK = 8  # of the adapters that are proposed
TOKENS = 2048  # in a row that nobody asked for, as far as a model has positions
ADAPTERS, CHUNKED = f"--lora {ADAPTER_RANK}", "--chunked-mlp"


class Sizes(NamedTuple):
    """What a plan of memory needs to know of a run."""

    config: "Config"
    batch: int
    tokens: int
    device: str | None
    exists: bool  # the model: adapters may be added
    adapter: "Adapter | None" = None  # that it has
    quantized: str | None = None  # the kind of its weights

    def planned(self, plan: "Settings", **changes: Any) -> MemoryPlan:
        """Return what a step takes, or would take with some changes."""
        options = {
            "batch": self.batch,
            "tokens": self.tokens,
            "dtype": plan.dtype,
            "state_bits": plan.state_bits,
            "rank": None if self.adapter else plan.lora,
            "adapter": self.adapter,
            "quantization": self.quantized,
            "checkpoint_every": plan.checkpoint or plan.checkpoint_every,
            "accumulate": plan.accumulate,
            "chunked_mlp": plan.chunked_mlp,
            "device": "cpu" if self.device is None else "cuda",
        }
        return plan_memory(self.config, **{**options, **changes})


def tokens_of(asked: int | None, positions: int) -> int:
    """Return the tokens of a row: those asked for, or 2048 as far as a model has positions."""
    if asked is None:
        return min(TOKENS, positions)
    check_tokens(asked, positions)
    return asked


def check_tokens(tokens: int, positions: int) -> None:
    """Raise a ConfigError for rows that are longer than a model has positions."""
    if tokens > positions:
        raise ConfigError(f"--tokens {tokens} is more than the {positions} positions of the model")


def quantized_kind(
    source: Any, wanted: str | None, lora: int | None, adapter: Any, stored: str | None
) -> str | None:
    """Return what the model's weights are quantized to; raise where nothing could be learned."""
    if wanted is not None and stored is not None:
        raise ConfigError(f"{source} is quantized already, as {stored}; leave --quantize out")
    kind = stored or wanted
    if kind is not None and adapter is None and lora is None:
        why = "--quantize" if stored is None else f"{source} is quantized, which"
        raise ConfigError(f"{why} freezes the weights: add --lora, as in --lora 16")
    return kind


def within(sizes: Sizes, plan: "Settings", limit: int | None) -> MemoryPlan:
    """Return what a step takes; raise if that is more than the limit, naming where and the cures.

    Without a limit it is the memory of the machine that a step has to fit in.

    Raises
    ------
    DeviceMemoryError
        ``required`` is the peak of a step, ``available`` the limit.
    """
    made = sizes.planned(plan)
    whole, free = device_memory(sizes.device) if limit is None else (limit, limit)
    first = None if whole is None else made.beyond(whole)
    if whole is None or first is None:
        if free is not None and made.total > free:
            told = f"a step holds {format_bytes(made.total)}; {format_bytes(free)} are free now"
            click.echo(f"{told}, of {format_bytes(whole or 0)}", err=True)
        return made
    held = sorted(first.held.items(), key=lambda item: -item[1])
    listed = ", ".join(f"{part} {format_bytes(size)}" for part, size in held if size)
    peak, over = f"{format_bytes(made.total)} at its peak", format_bytes(first.total - whole)
    where = f"--device {sizes.device or 'cpu'} has" if limit is None else "--limit-memory"
    raised = f"--limit-memory {made.total / 2**20 * 1.02:.0f}MiB"  # plans are that exact
    raised += " tries all the same" if limit is None else " would do"
    cures = _cures(sizes, plan, made, whole)
    raise DeviceMemoryError(
        f"{where} {format_bytes(whole)}: a step holds {peak}, in {made.moments[made.peak]};"
        f" {over} do not fit in {first} already ({listed}). {cures}{'; ' * bool(cures)}{raised}",
        made.total,
        whole,
    )


def _cures(sizes: Sizes, plan: "Settings", made: MemoryPlan, limit: int) -> str:
    """Return what switches would save, the most first."""
    from ..models.block import check_chunked

    changes: dict[str, dict[str, Any]] = {}
    if plan.checkpoint_every != 1:
        changes["--checkpoint-every 1"] = {"checkpoint_every": 1}
    if plan.dtype == "float32":
        changes["--dtype bfloat16"] = {"dtype": "bfloat16"}
    if sizes.batch > 1:
        batch, parts = -(-sizes.batch // 2), 2 * plan.accumulate
        changes[f"--batch {batch} --accumulate {parts}"] = {"batch": batch, "accumulate": parts}
    if sizes.tokens > 2:
        changes[f"--tokens {sizes.tokens // 2}"] = {"tokens": sizes.tokens // 2}
    if plan.state_bits == 32:
        changes["--state-bits 8"] = {"state_bits": 8}
    adapted = plan.lora is not None or sizes.adapter is not None
    if not (adapted or plan.chunked_mlp):
        with suppress(ConfigError):  # of an MLP that has no such form
            check_chunked(sizes.config, None)
            changes[CHUNKED] = {"chunked_mlp": True}
    if sizes.exists and not (adapted or plan.chunked_mlp):
        changes[ADAPTERS] = {"rank": ADAPTER_RANK}
    totals = {switch: sizes.planned(plan, **change).total for switch, change in changes.items()}
    useful = sorted((total, switch) for switch, total in totals.items() if total < made.total)
    if useful and useful[0][0] > limit:  # none is enough
        chosen = [switch for _, switch in useful]
        if ADAPTERS in chosen and CHUNKED in chosen:  # of the two either: adapters are on MLPs
            chosen.remove(CHUNKED)
        together: dict[str, Any] = {}
        for switch in chosen:
            together |= changes[switch]
        most = sizes.planned(plan, **together).total
        useful += [(most, " ".join(chosen))] * (most < useful[0][0])  # one may undo another
    told = [
        f"{switch} saves {format_bytes(made.total - total)}" + " and fits" * (total <= limit)
        for total, switch in useful
    ]
    return "; ".join(told)


class Memory:
    """Counts the arrays of a run: in all of its steps under a limit, else in the first ones."""

    def __init__(
        self, planned: MemoryPlan, limit: int | None, device: str | None, *, counts: bool = True
    ) -> None:
        self.planned, self.limit, self.device = planned, limit, device
        self.left = COUNTED if counts else 0

    @contextmanager
    def watched(self, arrays: Iterable[Any]) -> Iterator[None]:
        """Count inside a ``with`` block, beside arrays that are there already."""
        if not self.left:
            yield
            return
        number = None
        if self.device is None:  # what a first step imports is not an array
            importlib.import_module("scipy.sparse")
            importlib.import_module("scipy.special")
        else:
            number = int(self.device.partition(":")[2] or 0)
        self.pool = memory_pool(self.limit, number, held=arrays)
        with ExitStack() as self.stack:
            self.stack.enter_context(self.pool)
            yield

    def begin_step(self) -> bool:
        """Let the peak begin with what is held now; say whether counting slows this step alone."""
        if self.left:
            self.pool.reset_peak()
        return bool(self.left) and self.limit is None and self.device is None

    def end_step(self) -> dict[str, int]:
        """Return the planned and the measured peak of a step, for its line of the log."""
        if not self.left:
            return {}
        told = {"planned_bytes": self.planned.total, "peak_bytes": self.pool.peak}
        self.left -= self.limit is None
        if not self.left:
            self.stack.close()
        return told
