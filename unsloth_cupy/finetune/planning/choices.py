"""Chooses settings that fit a GPU.

fits = fit("Qwen3-8B", data="chats.jsonl", device="rtx4090")
fits.fastest.settings, fits.fastest.hours, fits.fastest.command
"""

import dataclasses
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from ...core.call import check_options
from ...errors import ConfigError, DeviceMemoryError
from ...files import path_of, read_json
from ...machine import device_memory, format_bytes
from ...models.configs.heads import chosen
from ...models.objective import next_token
from ...models.parse import parse
from ...profiling.cards import Card, card_here, card_named, card_of
from ..data.records import Records
from ..data.sources import find_data
from ..data.text import Text
from ..naming import named
from ..run.limit import Sizes, for_offload, quantized_kind, tokens_of
from ..run.reference import folder_of, with_teacher
from ..run.run_folder import config_file, model_folder, model_without_weights
from ..run.settings import Settings
from .candidates import RANKS, Bounds, Candidate, candidates, choice_of
from .data_size import DataSize, measured

# Part of a card's memory that arrays may use: the driver, the CUDA context and kernels need the
# rest, and plans are exact to 3 %.
USABLE = 0.93


BEYOND = 4  # longest row to try, as a multiple of the rows, if these exceed the model's positions
NEGLIGIBLE = 0.01  # difference of predicted times that is not worth a line
# settings that ``fit`` may choose
CHOSEN = (
    "lora", "quantize", "state_bits", "recompute_every", "offload", "batch", "accumulate", "tokens",
    "pack",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Fit:
    """Settings that fit a GPU, with what a step needs.

    Attributes
    ----------
    settings : Settings
        The settings of ``finetune``.
    device_bytes, host_bytes : int
        Planned peak of a step on the GPU, and of pinned memory on the host.
    seconds : float
        Predicted time of an optimizer step.
    tokens_per_second : float
        Tokens without padding in a step, divided by ``seconds``.
    steps : int or None
        Number of optimizer steps; None without data.
    hours : float or None
        Predicted time of all steps, without evaluations; None without data.
    longest_row : int
        Largest number of tokens in a row that fits, in a batch of one row.
    reasons : tuple of str
        For each setting that saves memory: the bytes that a step would need without it.  For
        packing: how much longer an epoch would take without it.
    command : str
        The command that trains with these settings.
    """

    settings: Settings
    device_bytes: int
    host_bytes: int
    seconds: float
    tokens_per_second: float
    steps: int | None
    hours: float | None
    longest_row: int
    reasons: tuple[str, ...]
    command: str


@dataclasses.dataclass(frozen=True)
class Fits:
    """The choices of ``fit``: the fastest, the one with the longest row, the smallest.

    ``card`` is the GPU; ``device_memory`` and ``host_memory`` are the bytes that arrays may use;
    ``tokens`` is the length of a row.  ``not_varied`` are settings that also change memory and
    time, and stay as they are, because they change what is learned.
    """

    fastest: Fit
    longest: Fit
    leanest: Fit
    card: Card
    device_memory: int
    host_memory: int
    tokens: int
    not_varied: tuple[str, ...]

    @property
    def steps(self) -> int | None:
        """The number of optimizer steps of the fastest choice; None without data."""
        return self.fastest.steps


class _Model(NamedTuple):
    """A model without weights."""

    folder: Path | None
    values: Any
    config: Any
    adapter: Any
    stored: str | None


@check_options
def fit(
    config: Any,
    *,
    data: Any = None,
    device: Any,
    method: str = "sft",
    host_memory: int | None = None,
    **fixed: Any,
) -> Fits:
    """Choose the settings with which a model can be trained on one GPU.

    Searches quantization, gradient checkpointing, offload, 8-bit optimizer states, LoRA rank,
    packing of data in rows, and the split of a batch into micro-batches (``batch`` times
    ``accumulate`` stays the same).  On-policy methods sample the answers of a micro-batch at once.
    Memory is planned as in ``plan_memory``; seconds are predicted from the roofline of each op and
    the fractions of it that kernels reached on an H200.  Nothing is allocated, and no GPU is
    needed.

    Parameters
    ----------
    config : dict or path
        Content of a config.json, its path, or the folder of a model or an adapter.
    data : optional
        Training data, as in ``read_data``; sets the length of rows and the number of steps.  It
        requires a folder with a tokenizer.
    device : str or mapping
        Name of a card ("rtx4090", "a100 40gb"), "cuda" or "cuda:1" for a GPU of this machine, whose
        free memory is a limit too, or a mapping as in ``explain`` with ``memory`` in GiB.
    method : str
        Training method.
    host_memory : int, optional
        Bytes of host memory that ``offload`` may use; by default 80 % of this machine's free
        memory.
    **fixed
        Fields of ``Settings`` that do not change.  ``lora=None`` trains all weights; the default is
        LoRA of rank 16.

    Returns
    -------
    fits : Fits

    Raises
    ------
    ConfigError
        The card, the data or a setting is invalid, or the memory of the card is unknown.
    DeviceMemoryError
        No settings fit; ``required`` is the least that a step needs.
    """
    card, usable = _card_of(device)
    settings = Settings(method=method, **fixed)
    learning, size, text = settings.learning, None, None
    model = _model_of(config, learning.loading)
    if data is not None and model.folder is None:
        raise ConfigError("fit(data=...): tokens need a tokenizer; pass the folder of a model")
    if data is not None:
        is_read = isinstance(data, Text | Records)
        text = data if is_read else find_data(data, (), "fit", method).read()
    if isinstance(text, Records):  # the number of labels is that of the data
        learning = learning.fitted(text, model.values)
        model = _model_of(config, learning.loading)
    if settings.device != "auto" or settings.limit_memory is not None:
        raise ConfigError("fit(): pass the GPU as device=, and leave limit_memory out")
    if settings.lora is None and "lora" not in fixed and model.adapter is None:
        settings = dataclasses.replace(settings, lora=RANKS[0])
    settings = dataclasses.replace(settings, dtype=settings.dtype or "bfloat16")
    settings.check_method()
    kind = quantized_kind(
        model.folder, settings.quantize, settings.lora, model.adapter, model.stored
    )
    if text is not None and model.folder is not None:
        size = measured(text, model.folder, settings, model.config, learning)
        settings = dataclasses.replace(settings, tokens=size.tokens)
    tokens = tokens_of(settings.tokens, model.config.positions)
    settings = dataclasses.replace(settings, tokens=tokens)
    texts = settings.batch * settings.accumulate
    if settings.by_text:  # each text is a pass, for every split
        settings, fixed = (
            dataclasses.replace(settings, batch=1, accumulate=texts),
            fixed | {"batch": 1},
        )
    teachers = {} if settings.teacher is None else {"teacher": folder_of(settings.teacher)}
    objective: Any = next_token if method == "sft" else with_teacher(learning, teachers)
    if learning.is_on_policy:
        objective = objective.sized(model.values)
    sizes = Sizes(
        model.config, settings.batch, tokens, "cuda", not model.config.bit_layers, model.adapter,
        kind, objective, texts=texts,
    )  # fmt: skip
    positions = model.config.positions
    limit = positions if tokens <= positions else BEYOND * tokens
    bounds = Bounds(card, usable, for_offload(host_memory), limit)
    packs = isinstance(text, Records) and not learning.is_on_policy and "pack" not in fixed
    choices, every = _chosen(settings, sizes, bounds, size, fixed, packs=packs)

    def described(candidate: Candidate) -> Fit:
        own = candidate.settings
        steps = None if size is None else size.steps(own)
        real = tokens if size is None or candidate.packed else size.share * tokens
        return Fit(
            own, round(candidate.size.device), round(candidate.size.host), candidate.seconds,
            own.batch * own.accumulate * real / candidate.seconds, steps,
            None if steps is None else steps * candidate.seconds / 3600,
            candidate.longest_row(bounds), (*_reasons(candidate, every, bounds, packs=packs),),
            _command(own, config, data, fixed),
        )  # fmt: skip

    fastest, longest, leanest = map(described, choices)
    varies = ("samples", "max_new_tokens") if learning.is_on_policy else ()
    not_varied = (named(**{name: getattr(fastest.settings, name)}) for name in varies)
    return Fits(fastest, longest, leanest, card, usable, bounds.host, tokens, (*not_varied,))


def fit_run(settings: Settings, data: Text | Records, source: Path | None, ranks: Any) -> Fits:
    """Return the choices for a run on its GPU; fields that are not defaults do not change."""
    if source is None or not ranks.alone or ranks.device is None:
        needs, cure = "an existing model", f"pass {named('model')}, or leave {named(fit=True)} out"
        if source is not None:
            needs = "a single process with a GPU"
            cure = "leave it out, or choose settings for another card: unsloth-cupy plan --fit"
        raise ConfigError(f"{named(fit=True)} needs {needs}; {cure}")
    usual = vars(Settings())
    fixed = {name: value for name, value in vars(settings).items() if value != usual[name]}
    for name in ("device", "method", "host_memory"):
        fixed.pop(name, None)
    return fit(
        source, data=data, device=ranks.device, method=settings.method,
        host_memory=settings.host_memory, **fixed,
    )  # fmt: skip


def with_choice(settings: Settings, choice: Fit) -> Settings:
    """Return settings with the fields that ``fit`` has chosen."""
    own = {name: getattr(choice.settings, name) for name in CHOSEN}
    return dataclasses.replace(settings, **own)


def _card_of(device: Any) -> tuple[Card, int]:
    """Return a card and the bytes that arrays may use."""
    if isinstance(device, str) and device.partition(":")[0] == "cuda":
        number = int(device.partition(":")[2] or 0)
        total, free = device_memory(device)
        if total is None or free is None:
            cure = 'pass the name of a card, as in device="rtx4090"'
            raise ConfigError(f"fit(device={device!r}): this machine has no such GPU; {cure}")
        card, usable = card_here(number), min(free, round(USABLE * total))
    else:
        card = card_named(device) if isinstance(device, str) else card_of(device)
        usable = round(USABLE * (card.memory or 0) * 2**30)
    if not usable or card.bandwidth is None or card.products is None:
        cure = 'pass {"architecture": 90, "memory": 80, "bandwidth": 3350, "products": 989.5}'
        problem = "memory (GiB), bandwidth (GB/s) or products (TFLOP/s) of this GPU are unknown"
        raise ConfigError(f"fit(device={device!r}): {problem}; {cure}")
    return card, usable


def _model_of(config: Any, loading: Mapping[str, Any]) -> _Model:
    """Return a model without weights, with the head that a method loads it with."""
    folder = None
    if isinstance(config, Mapping):
        values = config
    else:
        path = config_file(path_of("fit", config))
        folder, values = (
            None if path == Path(config) else model_folder(Path(config)),
            read_json(path),
        )
    values = chosen(values, loading.get("head"), loading.get("labels")).values
    if folder is None:
        return _Model(None, values, parse(values), None, None)
    return _Model(folder, values, *model_without_weights(folder, **loading))


def _chosen(
    settings: Settings,
    sizes: Sizes,
    bounds: Bounds,
    data: DataSize | None,
    fixed: Mapping[str, Any],
    *,
    packs: bool,
) -> tuple[list[Candidate], list[Candidate]]:
    """Return the fastest candidate that fits, the one with the longest row, and the smallest.

    The second list has all candidates, with the batch size of ``settings``.
    """
    for rank in (settings.lora,) if "lora" in fixed or settings.lora is None else RANKS:
        base = dataclasses.replace(settings, lora=rank)
        every = [*candidates(base, sizes, bounds.card, data, fixed)]
        # batches whose answers are sampled at once are counted in batches, and would change
        may_split = not fixed.keys() & {"batch", "steps_per_generation"}
        single = [each.with_batch(1) if may_split else each for each in every]
        small = [each for each in single if each.fits(bounds)]
        whole = [each for each in every if each.fits(bounds)]
        orders = (
            sorted(_largest(every, bounds, may_split, packs), key=_cost),
            sorted(small or whole, key=lambda each: -each.about_longest(bounds)),
            sorted([*small, *whole], key=lambda each: each.estimate.device),
        )
        planned = [next((e for e in order if bounds.holds(e.size)), None) for order in orders]
        fitting = [each for each in planned if each is not None]
        if len(fitting) == len(orders):
            return fitting, every
    least = min([*single, *every], key=lambda each: each.estimate.device)
    needs = f"{format_bytes(least.size.device)} and {format_bytes(least.size.host)} of host memory"
    raise DeviceMemoryError(
        f"fit: no settings fit into the {format_bytes(bounds.device)} that arrays may use on"
        f" {bounds.card.name}: even with {least.settings}, a step needs {needs}; pass fewer tokens,"
        " a smaller model or a larger GPU",
        round(least.size.device),
        bounds.device,
    )


def _cost(candidate: Candidate) -> float:
    """Return the seconds of an epoch; offload must be more than 5 % faster, as copies may stall."""
    return candidate.cost * (1.05 if candidate.settings.offload else 1.0)


def _largest(
    every: Sequence[Candidate], bounds: Bounds, may_split: bool, packs: bool
) -> Iterator[Candidate]:
    """Yield each candidate that fits, with its largest micro-batch that fits, packed or not."""
    for candidate in every:
        batch = candidate.settings.batch
        halved = [batch >> n for n in range(batch.bit_length())]  # batch, batch / 2, ... 1
        tried = map(candidate.with_batch, halved if may_split else [batch])
        for each in islice((each for each in tried if each.fits(bounds)), 1):
            yield each
            if packs:
                yield each.with_pack(False)


def _reasons(
    candidate: Candidate, every: Sequence[Candidate], bounds: Bounds, *, packs: bool
) -> Iterator[str]:
    """Yield, for each setting that saves memory, about the bytes that a step needs without it.

    For packing, yield how much longer an epoch takes without it.
    """
    if packs:
        longer = candidate.with_pack(False).cost / candidate.cost - 1
        if candidate.packed and longer > NEGLIGIBLE:
            yield f"{named(pack=True)}: without this, an epoch would take {longer:.0%} longer"
    own, usual = candidate.settings, every[0].settings
    by_choice = {each.choice: each for each in every}
    groups = ("quantize",), ("recompute_every", "offload"), ("offload",), ("state_bits",)
    for names in (*groups, ("batch", "accumulate")):
        values = {n: value for n in names if (value := getattr(own, n)) != getattr(usual, n)}
        without = dataclasses.replace(own, **{name: getattr(usual, name) for name in names})
        kind = None if "quantize" in values else candidate.sizes.quantized
        other = by_choice.get(choice_of(without, kind))
        if values and other is not None:
            size = other.about(without.batch)
            needed = f"a step would need {format_bytes(size.device)}"
            needed += f" and {format_bytes(size.host)} of host memory" * bool(size.host)
            fits = "" if bounds.holds(size) else ", which does not fit"
            yield f"{named(**values)}: without this, {needed}{fits}"


def _command(settings: Settings, config: Any, data: Any, fixed: Mapping[str, Any]) -> str:
    """Return the command that trains with these settings."""
    words = ["unsloth-cupy", "finetune"]
    words += ["MODEL"] if isinstance(config, Mapping) else [str(config)]
    for part in data if isinstance(data, list | tuple) else [data]:
        is_path = isinstance(part, str | Path)
        words += ["--data", str(part) if is_path else "FILE"]
    own = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    usual = vars(Settings())
    derived = {"dtype": "bfloat16"} | ({} if data is None else {"tokens": settings.tokens})
    for name, value in own.items():
        is_usual = value == usual[name] or (name not in fixed and value == derived.get(name))
        if is_usual or value in (None, ()):
            continue
        flag = "--" + name.replace("_", "-")
        parts = value if isinstance(value, list | tuple) else [value]
        for part in parts:
            if part is not False:
                words += [flag] if part is True else [flag, str(part)]
    return shlex.join(words)
