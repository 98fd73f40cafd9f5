"""Candidates of ``fit``: settings with their planned memory and predicted time."""

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cached_property, partial
from typing import Any, NamedTuple

from ...core.dtypes import KERNEL_DTYPES, float_dtype
from ...errors import ConfigError
from ...memory.largest import Largest
from ...memory.planned_model import new_adapter
from ...models.configs.few_layers import extrapolated
from ...models.quantizer import check_stacks
from ...profiling.cards import Card
from ...profiling.training_step import explain_step
from ..run.limit import Sizes
from ..run.settings import Plan, Settings
from .data_size import DataSize

CODES = "nf4"  # quantization to try: the smallest codes whose products have a fast kernel
RANKS = 16, 8  # LoRA ranks to try; the second only if nothing fits with the first
CLOSE = 0.03  # error of the line, as a part of the limit
STEP = 64  # tokens by which rows are lengthened
# Tokens of generation per second, as a fraction of bandwidth / bytes of weights: 0.59 ms per token
# measured on an H200, where a copy reads the weights in 0.24 ms (docs/performance.md, On an H200).
DECODING = 0.41
ROUNDED = 4  # bytes written and read for each weight that a pass dequantizes to 16 bits


class Bytes(NamedTuple):
    """Planned bytes of a step."""

    device: float
    host: float
    weights: float


class Bounds(NamedTuple):
    """What settings must fit: a card with its usable bytes, bytes of the host, tokens of a row."""

    card: Card
    device: int
    host: int
    positions: int

    def holds(self, size: Bytes) -> bool:
        """Return whether a step of this size fits."""
        return size.device <= self.device and size.host <= self.host


def choice_of(settings: Settings, quantized: str | None) -> tuple[Any, ...]:
    """Return the settings of a candidate that ``candidates`` varies."""
    offload = bool(settings.offload)
    return settings.lora, quantized, settings.state_bits, settings.recompute_every, offload


@dataclasses.dataclass(eq=False)
class Candidate:
    """Settings of a step, with planned memory and predicted time."""

    settings: Settings
    sizes: Sizes
    card: Card
    accumulated: float = 0.0  # bytes that gradient accumulation adds
    data: DataSize | None = None

    @property
    def choice(self) -> tuple[Any, ...]:
        """The settings that ``candidates`` varies."""
        return choice_of(self.settings, self.sizes.quantized)

    @cached_property
    def plan(self) -> Plan:
        """The settings with their defaults."""
        return self.settings.decided(new=False)

    @cached_property
    def size(self) -> Bytes:
        """The planned bytes of a step."""
        return self._planned(self.sizes.config, self.settings.batch, self.sizes.tokens)

    def bytes_of(self, batch: int, tokens: int, *, accumulate: int = 1) -> Bytes:
        """Return the bytes of a step with a batch of rows, from plans of fewer layers."""
        each = partial(self._planned, batch=batch, tokens=tokens, accumulate=accumulate)
        return Bytes(*self._measured(each))

    def _planned(self, config: Any, batch: int, tokens: int, **changes: Any) -> Bytes:
        sizes = self.sizes._replace(config=config, batch=batch, tokens=tokens)
        plan = sizes.planned(self.plan, **changes)
        return Bytes(plan.total, plan.host, plan.weights)

    @cached_property
    def line(self) -> tuple[Bytes, Bytes]:
        """The bytes of one row, and what each further row adds."""
        batch, tokens = self.settings.batch, self.sizes.tokens
        one = self.bytes_of(1, tokens)
        more = max(batch, 2)
        all_rows = self.bytes_of(more, tokens)
        pairs = zip(one, all_rows, strict=True)
        return one, Bytes(*((end - start) / (more - 1) for start, end in pairs))

    def about(self, rows: float) -> Bytes:
        """Return the bytes of a step without accumulation, by the line."""
        pairs = zip(*self.line, strict=True)
        return Bytes(*(one + (rows - 1) * each for one, each in pairs))

    @property
    def estimate(self) -> Bytes:
        """The bytes of a step by the line."""
        size = self.about(self.settings.batch)
        more = self.accumulated * (self.settings.accumulate > 1)
        return size._replace(device=size.device + more)

    def fits(self, bounds: Bounds) -> bool:
        """Return whether a step fits; plan it only where the line is too close to the limit."""
        size, limit = self.estimate, bounds.device
        is_close = abs(size.device - limit) < CLOSE * limit
        return bounds.holds(self.size if is_close else size)

    def with_batch(self, batch: int) -> "Candidate":
        """Return the settings with another micro-batch, and as many rows in a step."""
        rows = self.settings.batch * self.settings.accumulate
        accumulate = self.settings.accumulate if batch == self.settings.batch else -(-rows // batch)
        return self._with(batch=batch, accumulate=accumulate)

    def with_pack(self, pack: bool) -> "Candidate":
        """Return the settings with or without packing; full rows need the same memory."""
        return self._with(pack=pack)

    def _with(self, **changes: Any) -> "Candidate":
        candidate = dataclasses.replace(
            self, settings=dataclasses.replace(self.settings, **changes)
        )
        candidate.line = self.line
        return candidate

    @property
    def packed(self) -> bool:
        """Whether texts share rows."""
        return self.settings.pack is not False

    @property
    def row(self) -> float:
        """The mean number of tokens of a row, with padding."""
        if self.data is None:
            return self.sizes.tokens
        return self.data.row(self.settings.batch, packed=self.packed)

    @property
    def cost(self) -> float:
        """The seconds of an epoch, or without data of a step."""
        rows = 1.0 if self.data is None else self.data.rows(packed=self.packed)
        return rows * self.seconds

    def about_longest(self, bounds: Bounds) -> float:
        """Return about how many tokens a row can have, by the line."""
        one, each = self.line
        limits = [float(bounds.positions)]
        for start, slope, limit in zip(one, each, (bounds.device, bounds.host), strict=False):
            if slope > 0:
                limits.append(self.sizes.tokens * (1 + (limit - start) / slope))
        return min(limits)

    @cached_property
    def seconds(self) -> float:
        """The predicted seconds of an optimizer step, with its sampled answers if any."""
        plan, sizes, tokens = self.plan, self.sizes, max(2, round(self.row))

        def measure(config: Any) -> tuple[float, float]:
            adapter = sizes.adapter
            if adapter is None and plan.adapters is not None:
                adapter = new_adapter(config, **plan.adapters.options(config, plan.trained_tokens))
            explanation = explain_step(
                config, batch=plan.batch, tokens=tokens, adapter=adapter,
                dtype=float_dtype("fit", plan.dtype, KERNEL_DTYPES), device=self.card,
                optimizer=plan.kind, state_bits=plan.state_bits, quantization=sizes.quantized,
                checkpoint=plan.checkpoint, objective=sizes.objective,
            )  # fmt: skip
            *passes, _ = explanation.steps
            one = dataclasses.replace(explanation, steps=tuple(passes)).seconds or 0.0
            return one, (explanation.seconds or 0.0) - one

        one, optimizer = self._measured(measure)
        per_gb = 1 / (self.card.bandwidth or 1) / 1e9
        if sizes.quantized is not None:
            passes = 2 + (plan.recompute_every is not None)
            one += passes * ROUNDED * self._frozen * per_gb
        host = self.estimate.host * tokens / sizes.tokens
        one = max(one, 2 * host / self.card.link / 1e9)  # offloaded, and back
        sampled = getattr(sizes.objective, "max_new_tokens", 0)
        answers = sampled * self.estimate.weights * per_gb / DECODING
        return plan.accumulate * (one + answers) + optimizer

    def longest_row(self, bounds: Bounds) -> int:
        """Return the tokens of the longest row that fits, in a batch of one."""
        step = min(STEP, bounds.positions)
        most = bounds.positions // step * step
        host = self.line[1].host / self.sizes.tokens  # bytes per token
        if host > 0:
            most = min(most, int(bounds.host / host) // step * step)

        def planned(tokens: int) -> int:
            return round(self.bytes_of(1, tokens).device)

        rows = Largest(planned, step, most)(bounds.device) if most else 0
        while (
            rows and self._planned(self.sizes.config, 1, rows, accumulate=1).device > bounds.device
        ):
            rows = int(rows * (1 - CLOSE)) // step * step  # fewer layers have their peak elsewhere
        return rows

    @property
    def _frozen(self) -> int:
        """The number of weights in the matrices of blocks."""
        shapes = self.sizes.config.shapes().items()
        return sum(shape[0] * shape[1] for name, shape in shapes if len(shape) == 2
                   and ".layers." in name)  # fmt: skip

    def _measured(self, measure: Any) -> list[float]:
        if self.sizes.adapter is not None:  # it has parameters for every layer
            return [*measure(self.sizes.config)]
        return extrapolated(self.sizes.config, measure)


def candidates(
    settings: Settings, sizes: Sizes, card: Card, data: DataSize | None, fixed: Mapping[str, Any]
) -> Iterator[Candidate]:
    """Yield candidates with the batch size of ``settings``; settings in ``fixed`` do not change."""

    def options(name: str, *others: Any) -> tuple[Any, ...]:
        return (getattr(settings, name),) if name in fixed else others

    adapted = settings.lora is not None or sizes.adapter is not None
    kinds: tuple[str | None, ...] = (sizes.quantized,)
    if sizes.quantized is None and adapted and settings.merge_into is None:
        with suppress(ConfigError):  # experts that this kind does not quantize
            check_stacks("fit", CODES, sizes.config)
            kinds = options("quantize", None, CODES)
    accumulated = None  # equal for all, as they train the same parameters
    wide = adapted or settings.kind != "adamw"
    for kind in kinds:
        for bits in options("state_bits", *((32,) if wide else (32, 8))):
            for every in options("recompute_every", None, 1):
                for offload in options("offload", False, *[True] * (every is not None)):
                    if offload and every is None:
                        continue
                    changed = dataclasses.replace(
                        settings, quantize=settings.quantize if sizes.quantized else kind,
                        state_bits=bits, recompute_every=every, offload=offload or None,
                    )  # fmt: skip
                    own = sizes._replace(quantized=kind)
                    candidate = Candidate(changed, own, card, data=data)
                    if accumulated is None:
                        two = candidate.bytes_of(1, sizes.tokens, accumulate=2)
                        accumulated = two.device - candidate.line[0].device
                    candidate.accumulated = accumulated
                    yield candidate
