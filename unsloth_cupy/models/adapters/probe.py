"""Compare the outputs of two models for a few tokens, with one block of each in memory at a time.

The difference of a row of hidden states or logits is |after - before| / |before|.  The result is
the largest difference of a row; for a mixture it is the median, because a rounded router may choose
another expert for a token.
"""

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...core.dtypes import FLOAT32, Array
from ...errors import ConfigError
from ...ops.quantized.weight import Quantized
from ...placement import to_numpy
from ...training.checkpoint import CheckpointConfig
from ..configs.config import Config
from ..configs.heads import NONE, OWN
from ..configs.names import ADAPTED, TABLE, is_norm
from ..folders.checkpoint_files import find_tensors, opened
from ..folders.lazy_parameter import LazyParameter
from ..objective import TrainingStep

if TYPE_CHECKING:
    from .adapter import Adapter

ROWS, TOKENS = 2, 8
ROUNDING = 32.0  # largest difference due to rounded weights, in units of the dtype's epsilon
EPS = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-23, "float64": 2.0**-52}
LEAST = 1e-3  # difference due to another order of sums
MORE = 1.01  # factor on the error of a tensor, whose norm is summed in another order


class Unread:
    """A placeholder for a parameter that is read when its block runs."""

    dtype = FLOAT32


class Probed(NamedTuple):
    """A model whose parameters are read one by one, on the host and in float32."""

    kind: Any  # Transformer, or a class derived from it
    path: Any  # named in errors
    config: Config
    texts: Mapping[str, Mapping[str, Any]]
    names: Collection[str]
    read: Callable[[str], Any]
    adapter: "Adapter | None" = None  # an adapter that is not merged

    def numbers(self, tokens: Array) -> Array:
        """Return the model's logits or embeddings for tokens, (rows, columns)."""
        own = {} if self.adapter is None else self.adapter.parameters
        parameters = dict[str, Any](dict.fromkeys(self.names, Unread()))

        def read(name: str) -> Any:
            head = own.get(ADAPTED + name)  # which the base may lack
            return self.read(name) if head is None else head

        parameters[TABLE] = read(TABLE)
        whole = self.kind(self.config, parameters, self.texts)
        whole.step = TrainingStep(CheckpointConfig())  # blocks are gathered one by one
        whole.adapter = self.adapter
        whole.gather = lambda named: {
            name: read(name) if isinstance(value, Unread) else value
            for name, value in named.items()
        }
        numbers: Array = whole.embeddings(tokens) if whole.head == NONE else whole.logits(tokens)
        return numbers.reshape(-1, numbers.shape[-1])


def probed(model: Any, kind: Any) -> Probed:
    """Return ``Probed`` for a ``StoredModel``, with the weights its adapter was trained for."""
    facts = kind, model.path, model.config, model.texts, model.homes
    if model.adapter is not None and model.adapter.into is not None:
        return Probed(*facts, lambda name: model.merged(name, FLOAT32, exact=False))
    return Probed(*facts, lambda name: model.read(name, FLOAT32), model.adapter)


def held(model: Any, parameters: Mapping[str, Any], adapter: "Adapter | None") -> Probed:
    """Return ``Probed`` for a model in memory, which copies parameters to the host one by one."""
    through = adapter is not None and adapter.into is not None

    def read(name: str) -> Any:
        value = wide(parameters[name])
        if adapter is None or not through:
            return value
        return adapter.merge(name, value, requantize=True)

    if adapter is not None:
        adapter = adapter.holding({name: to_numpy(a) for name, a in adapter.parameters.items()})
        pairs = adapter.initial.items()
        adapter.initial = {name: (to_numpy(a), to_numpy(b)) for name, (a, b) in pairs}
    where = model.folder or "the model in memory"
    own = None if through else adapter
    config = model.config if model.division is None else model.division.whole
    return Probed(type(model), where, config, model.texts, parameters, read, own)


def wide(value: Any) -> Any:
    """Return a parameter on the host, in float32 or quantized."""
    if isinstance(value, Quantized):
        return value.moved(to_numpy).computed_in(FLOAT32)
    return to_numpy(value).astype(FLOAT32, copy=False)


def dense(value: Any) -> Array:
    """Return a parameter dense, on the host in float32."""
    array: Array = wide(value.dequantize(FLOAT32) if isinstance(value, Quantized) else value)
    return array


def check_written(
    call: str,
    name: str,
    expected: Any,
    written: Any,
    error: float,
) -> None:
    """Raise a ConfigError if a written weight differs by more than ``error``, due to rounding."""
    exact = dense(expected)
    off, size = (float(np.linalg.norm(each)) for each in (dense(written) - exact, exact))
    scale = size + exact.size**0.5 * is_norm(name)  # a file may store a norm plus 1
    if not off <= MORE * error + EPS["float32"] * scale and np.isfinite(size):
        problem = f"the written {name} has an error of {off:.3g} (norm {size:.3g}), and"
        cure = "nothing was written: report this, and use the adapter unmerged"
        raise ConfigError(f"{call}: {problem} rounding explains {error:.3g}; {cure}")


def check_same(
    call: str, before: Probed, after: Probed, most: float = LEAST, own: Collection[int] = ()
) -> float:
    """Return the difference of two models' outputs; raise if it is more than ``most``.

    The compared tokens include tokens of ``own``.  The difference is 0 if outputs of ``before`` are
    not finite.

    Raises
    ------
    ConfigError
        The difference is more than ``most``.
    """
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, before.config.vocab, ROWS * TOKENS)
    tokens[: len([*own][:TOKENS])] = [*own][:TOKENS]
    tokens = tokens.reshape(ROWS, TOKENS)
    first, second = (model.numbers(tokens) for model in (before, after))
    sizes = np.linalg.norm(first, axis=-1)
    if not np.isfinite(sizes).all():
        return 0.0
    rows = np.linalg.norm(second - first, axis=-1) / np.where(sizes == 0, 1, sizes)
    difference = float(np.median(rows) if before.config.experts is not None else rows.max())
    if not difference <= most:
        problem = f"the outputs of the written model differ from those of {before.path} by a"
        problem += f" relative {difference:.2g}, and rounding explains {most:.2g}"
        cure = "nothing was written: report this, and use the adapter unmerged"
        raise ConfigError(f"{call}: {problem}; {cure}")
    return difference


def explained(dtype: "np.dtype[Any]") -> float:
    """Return the largest difference of outputs that rounding weights to a dtype explains."""
    return max(LEAST, ROUNDING * EPS[dtype.name])


def own_tokens(adapter: "Adapter | None") -> Collection[int]:
    """Return the tokens whose rows an adapter has."""
    return () if adapter is None else adapter.tokens.get(TABLE, ())


def check_saved(model: Any, parameters: Mapping[str, Any], folder: Path) -> None:
    """Raise a ConfigError if the outputs of a saved folder differ from the model's."""
    before = held(model, parameters, None)
    homes, _ = find_tensors(folder, before.config, OWN)

    def read(name: str) -> Any:
        with ExitStack() as stack:
            files = {each: stack.enter_context(opened(folder / each)) for each in homes[name].files}
            return LazyParameter(name, homes[name], files, FLOAT32).whole()

    check_same("save", before, before._replace(path=folder, names=homes, read=read))
