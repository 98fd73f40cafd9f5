"""Several adapters on one base: a batch in which each row has its own, and weighted sums.

    y = x Wᵀ, then y[rows] += scale (x[rows] Aᵀ) Bᵀ     for the rows of each adapter

One product with the weights serves all rows.  If an adapter has DoRA, biases or dropout, the layers
are computed separately for the rows of each adapter.  So they are in an invariant model, where rows
have the same bits as in a separate batch.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ...core.dtypes import FLOAT32, Array
from ...core.replay import is_fixed
from ...errors import ConfigError, ShapeError
from ...ops.elements.arithmetic import add, scale
from ...ops.linear.linear import linear
from ...parallel.taped import taped, value_of
from ...placement import to_device_of, to_numpy
from ..layers.call import Project
from ..layers.context import Context, own_tokens
from ..layers.elements import taken
from .adapter import BIAS, CONFIG, DOWN, MAGNITUDE, PREFIX, UP, Adapter, module_of
from .outer_weights import made_of

MARK = "@"  # between the names of a tensor and of its adapter


class ByRows(Adapter):
    """The adapters of a batch: each row, or each packed text, has one adapter or none.

    ``parameters`` are the parameters of all adapters, as ``NAME@ADAPTER``.
    """

    def __init__(self, adapters: Mapping[str, Adapter], rows: Sequence[str | None]) -> None:
        named = [*dict.fromkeys(name for name in rows if name is not None)]
        self.rows, self.adapters = tuple(rows), {name: adapters[name] for name in named}
        for name, adapter in self.adapters.items():
            if adapter.outer or adapter.stacks:
                problem = f"{name!r} changes tables, heads or experts, which all rows share"
                cure = "set_adapter and a separate batch, or merge_adapter"
                raise ConfigError(f"by_rows: {problem}; use {cure}")
            if adapter.into is not None:
                problem = f"{name!r} is trained through {adapter.into.kind}, which rounds weights"
                cure = "set_adapter and a separate batch, or merge_adapter"
                raise ConfigError(f"by_rows: {problem} that all rows share; use {cure}")
        self.dropout = max((each.dropout for each in self.adapters.values()), default=0.0)
        every = [name for each in self.adapters.values() for name in each.parameters]
        self.plain = not any(name.endswith((MAGNITUDE, f".{BIAS}")) for name in every)
        self.settings, self.tokens, self.stacks, self.others, self.stored = {}, {}, {}, {}, {}
        self.scales = {n: own for each in self.adapters.values() for n, own in each.scales.items()}
        self.parameters = {
            f"{name}{MARK}{key}": array
            for key, adapter in self.adapters.items()
            for name, array in adapter.parameters.items()
        }

    def project(
        self,
        tokens: Any,
        offsets: Any,
        seed: int | None,
        plain: Project,
        context: Context | None,
        first: int = 0,
    ) -> Project:
        """Return the function that computes linear layers for rows of tokens, or packed texts.

        ``first`` is the number of each adapter's first token; dropout masks depend on it.
        """
        if offsets is None:
            self.check(len(tokens))
        else:
            self.check(len(offsets) - 1, "packed texts")
        names = self.names(offsets)
        axis = 0 if offsets is None else 1
        own = own_tokens(context, names[None])[0] if axis else names
        places = {key: np.flatnonzero(own == key) for key in dict.fromkeys(self.rows)}
        places = {key: place for key, place in places.items() if place.size}
        numbers = {}
        if (context is not None or first) and self.dropout and seed is not None:
            own_part = np.asarray if context is None else context.own
            every = np.broadcast_to(names if axis else names[:, None], tokens.shape)
            for key in places:  # token numbers as in a separate batch of this adapter
                number = np.cumsum(every == key, dtype=np.int32).reshape(every.shape) - 1
                numbers[key] = own_part(number)[own_part(every) == key] + first
        return partial(self._linears, places, {}, numbers, axis, seed, plain)

    def check(self, count: int, what: str = "rows") -> None:
        """Raise a ShapeError unless there are as many names as rows, or packed texts."""
        if count != len(self.rows):
            problem = f"by_rows: {len(self.rows)} adapters are named for {count} {what}"
            raise ShapeError(
                f"{problem}; name one, or None, for each", expected=len(self.rows), actual=count
            )

    def names(self, offsets: Any) -> Array:
        """Return the name of each row, or of each token of packed texts."""
        names = np.array(self.rows, object)
        return names if offsets is None else np.repeat(names, np.diff(to_numpy(offsets)))

    def _linears(
        self,
        places: Mapping[str | None, Array],
        own: dict[str | None, Any],
        numbers: Mapping[str | None, Array],
        axis: int,
        seed: int | None,
        plain: Project,
        parameters: Mapping[str, Any],
        modules: Sequence[str],
        x: Any,
    ) -> list[Any]:
        """Return the outputs of linear layers, each row with its adapter.

        ``own`` are the places on the device of x.  The first layer sends them there: a captured
        step must find them there, because a graph cannot repeat a copy from the host.
        """
        if len(places) == 1:
            return self._of_one(next(iter(places)), numbers, seed, plain, parameters, modules, x)
        if not own:
            own |= {key: to_device_of(place, value_of(x)) for key, place in places.items()}
        rows = {key: taken(x, place, axis) for key, place in own.items()}
        if not self.plain or (self.dropout and seed is not None) or is_fixed():
            parts = [
                self._of_one(key, numbers, seed, plain, parameters, modules, part)
                for key, part in rows.items()
            ]
        else:
            whole = plain(parameters, modules, x)
            parts = [
                [
                    self._added(key, parameters, name, taken(y, own[key], axis), part)
                    for name, y in zip(modules, whole, strict=True)
                ]
                for key, part in rows.items()
            ]
        return [joined(each, [*own.values()], axis) for each in zip(*parts, strict=True)]

    def _added(
        self, key: str | None, parameters: Mapping[str, Any], module: str, y: Any, x: Any
    ) -> Any:
        """Return the output of a layer for some rows, with their adapter's update added."""
        if key is None or module not in (adapter := self.adapters[key]).scales:
            return y
        kind = value_of(x).dtype
        pair = adapter.pair(Own(parameters, key), module)
        down, up = (made_of([each], kind, lambda each: each) for each in pair)
        return add(y, scale(linear(linear(x, down), up), factor=adapter.scales[module]))

    def _of_one(
        self,
        key: str | None,
        numbers: Mapping[str | None, Array],
        seed: int | None,
        plain: Project,
        parameters: Mapping[str, Any],
        modules: Sequence[str],
        x: Any,
    ) -> list[Any]:
        """Return the outputs of linear layers with one adapter, or with none."""
        if key is None:
            return plain(parameters, modules, x)
        own = to_device_of(numbers[key], value_of(x)) if key in numbers else None
        return self.adapters[key].linears(Own(parameters, key), modules, x, seed, own)

    def row(self, index: int) -> "ByRows":
        """Return the adapters for a batch of one row alone."""
        return ByRows(self.adapters, self.rows[index : index + 1])

    def merge(self, *_: Any, **__: Any) -> Any:
        """Raise a ConfigError: only a single adapter can be merged or saved."""
        problem = "each row of the batch has its own adapter"
        raise ConfigError(
            f"by_rows: {problem}; choose one by set_adapter(name), and merge or save it"
        )

    merged = save = check_merges = merge

    @property
    def outer(self) -> list[str]:
        """No tensors: adapters with tables or heads are refused."""
        return []

    def outside(self, parameters: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return parameters unchanged: no adapter changes weights outside of the blocks."""
        return parameters


class Own(Mapping[str, Any]):
    """Parameters in which the tensors of one adapter have their plain names."""

    def __init__(self, parameters: Mapping[str, Any], key: str) -> None:
        self.parameters, self.mark = parameters, MARK + key

    def __getitem__(self, name: str) -> Any:
        return self.parameters[name + self.mark if name.startswith(PREFIX) else name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.parameters)

    def __len__(self) -> int:
        return len(self.parameters)


def joined(parts: Sequence[Any], places: Sequence[Array], axis: int) -> Any:
    """Return an array with each part at its places along an axis."""
    values, before = [value_of(part) for part in parts], (slice(None),) * axis
    shape = [*values[0].shape]
    shape[axis] = sum(value.shape[axis] for value in values)
    y = np.empty_like(values[0], shape=tuple(shape))
    for value, place in zip(values, places, strict=True):
        y[(*before, place)] = value
    names = [f"part_{i}" for i in range(len(parts))]
    of = dict(zip(names, places, strict=True))

    def back(dy: Any, wanted: Any) -> dict[str, Any]:
        return {name: dy[(*before, of[name])] for name in wanted}

    return taped("by_rows", y, back, **dict(zip(names, parts, strict=True)))


def mixed(adapters: Mapping[str, Adapter], weights: Mapping[str, float]) -> Adapter:
    """Return the weighted sum of adapters, by concatenating their A and B.

    The update of each weight is sum(weight scale B A), with the sum of the ranks.

    Raises
    ------
    ConfigError
        An adapter has more parameters than A and B: DoRA, biases, token rows or modules.
    """
    parts: dict[str, list[tuple[Any, Any]]] = {}
    for name, weight in weights.items():
        adapter = adapters[name]
        others = [n for n in adapter.parameters if n.endswith((MAGNITUDE, BIAS))]
        if adapter.into is not None:
            problem = f"{name!r} is trained through {adapter.into.kind}, whose rounding has no sum"
            raise ConfigError(f"mix_adapters: {problem}; merge it into the base instead")
        if others or adapter.outer or adapter.stacks:
            what = module_of((others or adapter.outer or [*adapter.parameters])[0])
            problem = f"{name!r} has more than A and B, as in {what}: there is no weighted sum"
            raise ConfigError(f"mix_adapters: {problem}; merge it into the base instead")
        for module, own in adapter.scales.items():
            down, up = adapter.pair(adapter.parameters, module)
            wide = up.astype(np.promote_types(up.dtype, FLOAT32))
            parts.setdefault(module, []).append((down, (wide * (weight * own)).astype(up.dtype)))
    first = adapters[next(iter(weights))]
    parameters = dict[str, Any]()
    for module, pairs in parts.items():
        parameters[f"{PREFIX}{module}.{DOWN}"] = np.concatenate([down for down, _ in pairs])
        parameters[f"{PREFIX}{module}.{UP}"] = np.concatenate([up for _, up in pairs], axis=1)
    ranks = {module: sum(len(down) for down, _ in pairs) for module, pairs in parts.items()}
    stored = {m: s for name in weights for m, s in adapters[name].stored.items() if m in parts}
    rank = max(ranks.values())
    patterns = {stored[module]: each for module, each in ranks.items() if each != rank}
    settings = {
        **first.settings,
        "r": rank, "lora_alpha": rank, "use_rslora": False, "lora_dropout": 0.0,
        "rank_pattern": patterns, "alpha_pattern": dict(patterns), "init_lora_weights": True,
        "target_modules": sorted({name.rpartition(".")[2] for name in stored.values()}),
        **dict.fromkeys(("layers_to_transform", "layers_pattern", "exclude_modules")),
    }  # fmt: skip
    result = Adapter(settings, parameters, stored=stored, path=CONFIG)
    result.base = first.base
    return result
