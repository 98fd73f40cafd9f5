"""Compiles all kernels for training and generation with a model, ahead of time.

The training step of ``plan_memory``, and a prompt with one decoding step, run on arrays without
elements; the kernels that they launch are compiled in parallel and written to disk.
"""

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .. import kernel_cache as cache
from ..core import gpu
from ..core.dtypes import KERNEL_DTYPES, float_dtype
from ..core.target import Run
from ..errors import ConfigError
from ..memory.plan import plan_memory
from ..memory.planned import Planned
from ..models.generation.rollouts import planned_steps
from ..models.parse import parse
from ..models.quantizer import Quantizer, check_stacks
from ..models.transformer import Transformer
from ..ops.common.tensor_map import NVRTC
from .binary import compiled, version
from .cards import Card
from .explain import Described, recording
from .explanation import Launch
from .watch import watching

PROMPT = 2  # new tokens after a prompt, so that the decoding step runs once


class Unit(NamedTuple):
    """A translation unit for an architecture, and the key of its binary in the cache."""

    kernel: str
    source: str
    architecture: int
    key: str


class Compiled(NamedTuple):
    """A unit and its compile time in seconds; 0 if it was in the cache."""

    unit: Unit
    seconds: float


class Collector:
    """Records all launches."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []

    def wrapped(self, op: Any, run: Run, why: str | None) -> Run:
        """Return ``run`` unchanged."""
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
    """Return one launch of each kernel in a training step, a prompt and a decoding step.

    Parameters
    ----------
    values : dict
        Content of a Hugging Face config.json.
    card : Card
        The GPU to compile for.
    batch, tokens : int
        Rows, and tokens per row, of a step and of a prompt.
    dtype : str
        Dtype of the computation.
    quantization : str, optional
        Quantization of the linear layers; without a ``rank``, there is no training step.
    **options
        Options of ``plan_memory``.

    Raises
    ------
    ConfigError
        ``plan_memory`` raises it.
    """
    collector = Collector()
    sizes: dict[str, Any] = {"batch": batch, "tokens": tokens}
    trains = quantization is None or options.get("rank") is not None
    machine = Described(card.limits, maps=version() >= NVRTC)
    with watching(collector, machine), recording(collector):
        if trains:
            plan_memory(values, **sizes, dtype=dtype, quantization=quantization, **options)
        _generate(values, dtype, quantization, (batch, tokens))
    return [*{(each.kernel, each.source): each for each in collector.launches}.values()]


def _generate(
    values: Mapping[str, Any], dtype: str, quantization: str | None, sizes: tuple[int, int]
) -> None:
    """Run a prompt and one decoding step, as ``generate`` does on a GPU."""
    config = parse(values)
    kind = float_dtype("precompile", dtype, KERNEL_DTYPES)
    parameters: Any = {name: Planned.of(size, kind) for name, size in config.shapes().items()}
    if quantization is not None:
        check_stacks("precompile", quantization, config)
        codes = Quantizer("precompile", quantization)
        parameters = {name: codes(name, array) for name, array in parameters.items()}
    batch, tokens = sizes
    for _ in planned_steps(Transformer(config, parameters, {}), batch, 1, tokens, PROMPT):
        pass


def units_of(launches: Iterable[Launch], architecture: int) -> list[Unit]:
    """Return the distinct translation units to compile."""
    number, name = version(), str(architecture)
    units = []
    for source, kernel in {launch.source: launch.kernel for launch in launches}.items():
        key = cache.key_of(source, gpu.compiler_options(source), number, name)
        units.append(Unit(kernel, source, architecture, key))
    return units


def precompile(
    units: Iterable[Unit], root: Path, processes: int | None = None
) -> Iterator[Compiled]:
    """Compile units that are not in the cache, in parallel; yield each unit when it is ready.

    Raises
    ------
    ConfigError
        The folder of the cache cannot be written to.
    KernelError
        A unit does not compile.
    """
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    missing = []
    for unit in units:
        if cache.find(root, unit.key) is None:
            missing.append(unit)
        else:
            yield Compiled(unit, 0.0)
    count = min(processes or os.cpu_count() or 1, len(missing))
    if count <= 1:
        for unit in missing:
            yield compile_unit(unit, root)
        return
    spawning = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, spawning) as pool:
        yield from pool.map(compile_unit, missing, [root] * len(missing))


def compile_unit(unit: Unit, root: Path) -> Compiled:
    """Compile a unit and write its binary to the cache."""
    start = time.perf_counter()
    binary, _ = compiled(unit.source, unit.architecture, ())
    cache.keep(root, unit.key, binary)
    return Compiled(unit, time.perf_counter() - start)


def needs_compiler() -> None:
    """Raise a ConfigError unless CuPy and NVRTC are installed."""
    try:
        version()
    except (ImportError, RuntimeError) as error:
        cure = "install unsloth-cupy[cuda12] or [cuda13]"
        raise ConfigError(f"precompile needs CuPy and NVRTC: {error}; {cure}") from error
