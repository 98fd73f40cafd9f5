"""Every kernel that a model's training and generation will ask for, compiled before it does.

The step of ``plan_memory`` and a prompt with one token behind it run on arrays that have shapes
alone; the kernels that their launches ask for are compiled side by side and kept on disk.
"""

import multiprocessing
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..compiled import cache
from ..core import gpu
from ..core.dtypes import KERNEL_DTYPES, float_dtype
from ..core.target import Run
from ..errors import ConfigError
from ..memory.plan import plan_memory
from ..memory.planned import Planned
from ..models.ahead import InOrder
from ..models.parse import parse
from ..models.quantized import Quantizer
from ..models.step import Step
from ..models.transformer import Transformer
from ..ops.common.tensor_map import NVRTC
from .binary import compiled, version
from .cards import Card
from .explain import Described, recording
from .explanation import Launch
from .watch import watching

PROMPT = 2  # tokens behind a prompt: the step that a graph holds is run once


class Unit(NamedTuple):
    """A translation unit for an architecture, and where its binary is kept."""

    kernel: str
    source: str
    architecture: int
    key: str


class Compiled(NamedTuple):
    """A unit with the seconds that it took; 0 where it was there."""

    unit: Unit
    seconds: float


class Collector:
    """The launches of calls, one for each translation unit."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []

    def wrapped(self, op: Any, run: Run, why: str | None) -> Run:
        """Return what runs in place of a call: the call."""
        return run


def launches_of(
    values: Mapping[str, Any],
    card: Card,
    *,
    batch: int,
    tokens: int,
    dtype: str,
    quantization: str | None = None,
    **options: Any,
) -> list[Launch]:
    """Return a launch of every kernel of a step of training, of a prompt and of a next token.

    Parameters
    ----------
    values : dict
        Of a Hugging Face config.json.
    card : Card
        Which GPU it is for.
    batch, tokens : int
        Rows, and tokens in a row: of a step, and of a prompt.
    dtype : str
        To compute in.
    quantization : str, optional
        Of the linear layers; a step then needs a rank among the options.
    **options
        Of ``plan_memory``.

    Raises
    ------
    ConfigError
        As ``plan_memory``.
    """
    found = Collector()
    sizes: dict[str, Any] = {"batch": batch, "tokens": tokens}
    trains = quantization is None or options.get("rank") is not None
    machine = Described(card.limits, maps=version() >= NVRTC)
    with watching(found, machine), recording(found):
        if trains:
            plan_memory(values, **sizes, dtype=dtype, quantization=quantization, **options)
        _generated(values, dtype, quantization, (batch, tokens))
    return [*{(each.kernel, each.source): each for each in found.launches}.values()]


def _generated(
    values: Mapping[str, Any], dtype: str, quantization: str | None, sizes: tuple[int, int]
) -> None:
    """Read a prompt and do the step of the next token, as ``generate`` does on a GPU."""
    config = parse(values)
    kind = float_dtype("precompile", dtype, KERNEL_DTYPES)
    parameters: Any = {name: Planned.of(size, kind) for name, size in config.shapes().items()}
    if quantization is not None:
        codes = Quantizer("precompile", quantization)
        parameters = {name: codes(name, array) for name, array in parameters.items()}
    model, (batch, tokens) = Transformer(config, parameters, {}), sizes
    prompt, real = np.zeros(sizes, np.int64), np.ones(sizes, bool)
    ahead = InOrder(model, Planned.of(sizes, np.int64), batch, tokens + PROMPT)
    ahead(prompt, real)
    Step(model, ahead.cache, real, tokens + PROMPT).run()


def units_of(launches: Iterable[Launch], architecture: int) -> list[Unit]:
    """Return what is to be compiled; kernels of one translation unit are one."""
    number, name = version(), str(architecture)
    found = []
    for source, kernel in {launch.source: launch.kernel for launch in launches}.items():
        key = cache.key_of(source, gpu.compiler_options(source), number, name)
        found.append(Unit(kernel, source, architecture, key))
    return found


def precompile(
    units: Iterable[Unit], root: Path, processes: int | None = None
) -> Iterator[Compiled]:
    """Compile units that the cache lacks, side by side, and yield each as it is there.

    Raises
    ------
    ConfigError
        The folder cannot be written.
    KernelError
        A unit does not compile.
    """
    missing = []
    for unit in units:
        if cache.find(root, unit.key) is None:
            missing.append(unit)
        else:
            yield Compiled(unit, 0.0)
    count = min(processes or os.cpu_count() or 1, len(missing))
    if count <= 1:
        for unit in missing:
            yield made(unit, root)
        return
    spawning = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, spawning) as pool:
        yield from pool.map(made, missing, [root] * len(missing))


def made(unit: Unit, root: Path) -> Compiled:
    """Compile a unit and keep its binary."""
    start = time.perf_counter()
    binary, _ = compiled(unit.source, unit.architecture, ())
    cache.keep(root, unit.key, binary)
    return Compiled(unit, time.perf_counter() - start)


def needs_compiler() -> None:
    """Raise ConfigError where there is no NVRTC."""
    try:
        version()
    except (ImportError, RuntimeError) as error:
        cure = "install unsloth-cupy[cuda12] or [cuda13]"
        raise ConfigError(f"precompile needs CuPy and NVRTC: {error}; {cure}") from error
