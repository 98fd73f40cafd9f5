"""Weights of an adapter outside of the blocks: rows of tables for tokens, and whole modules.

    base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta    new rows, of tokens
    base_model.model.lm_head.weight                                             a whole module

adapter_config.json has the tokens in ``trainable_token_indices``, the modules in
``modules_to_save``.  A head that is tied to its table follows it.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..core.call import is_integer
from ..core.dtypes import FLOAT32, Array
from ..core.gpu import device_of
from ..errors import ConfigError
from ..ops.linear.embedding import embedding
from ..ops.linear.replaced_rows import ReplacedRows
from ..placement import to_device_of
from ..training.tape import Gradients, add_up
from ..training.variable import Var
from .config import Config
from .names import ADAPTED, HEAD, SCORE, SCORE_BIAS, TABLE

ROWS = "token_adapter.trainable_tokens_delta"
TOKENS, MODULES, TIED = "trainable_token_indices", "modules_to_save", "ensure_weight_tying"
FULL = (TABLE, HEAD, SCORE, SCORE_BIAS)
OUTER = {"embed_tokens": (TABLE,), "lm_head": (HEAD,), "score": (SCORE, SCORE_BIAS)}


def listed_tokens(call: str, listed: Any) -> dict[str, tuple[int, ...]]:
    """Return the tokens whose rows are trained, by the table's name: of ids, or of ids by module.

    Raises
    ------
    ConfigError
        There is an id that is none, or twice; or another module; the message begins with ``call``.
    """
    by_module = listed if isinstance(listed, Mapping) else {"embed_tokens": listed}
    tokens = {}
    for module, ids in by_module.items():
        own = str(module).rpartition(".")[2]
        if own not in ("embed_tokens", "lm_head"):
            problem = f"{call}: {module!r} is no table of tokens"
            raise ConfigError(f"{problem}; choose embed_tokens or lm_head")
        many = isinstance(ids, Sequence | range | np.ndarray) and not isinstance(ids, str)
        known: list[Any] = [*ids] if many else [None]
        if not all(map(is_integer, known)):
            raise ConfigError(f"{call}: {str(ids)[:80]} is no list of token ids, 0 or more")
        if len({*known}) < len(known):
            twice = next(each for each in known if known.count(each) > 1)
            raise ConfigError(f"{call}: token {twice} is listed twice; list each once")
        if known:
            tokens[OUTER[own][0]] = tuple(map(int, known))
    return tokens


def listed_modules(settings: Mapping[str, Any]) -> set[str]:
    """Return the last components of the modules that adapter_config.json saves whole."""
    return {str(each).rpartition(".")[2] for each in settings.get(MODULES) or []}


def rows_name(name: str) -> str:
    """Return the name, in an adapter, of the rows of a table."""
    return f"{ADAPTED}{name.removesuffix('weight')}{ROWS}"


def check_outer(
    call: str, config: Config, tokens: Mapping[str, Sequence[int]], modules: Collection[str]
) -> None:
    """Raise a ConfigError unless a model has these tokens and modules, each trained in one way."""
    tables = {name: module for module, names in OUTER.items() for name in names}
    shapes = config.shapes()
    known = [module for module, names in OUTER.items() if names[0] in shapes]
    for module in (*modules, *(tables[name] for name in tokens)):
        if module in known:
            continue
        cure = f"choose from {', '.join(known)}"
        if module == "lm_head" and config.tied:
            cure = "it is tied to embed_tokens, and follows it: name embed_tokens alone"
        if module == "score":
            cure = "it is of classifiers: load the folder with head= and labels="
        raise ConfigError(f"{call}: {module!r} is no module of this model; {cure}")
    for name, ids in tokens.items():
        if tables[name] in modules:
            problem = f"{call}: {tables[name]} is trained whole, and some of its rows"
            raise ConfigError(f"{problem}; leave out tokens, or the module")
        if max(ids) >= config.vocab:
            problem = f"{call}: token {max(ids)} is outside the vocabulary of {config.vocab}"
            raise ConfigError(f"{problem}; resize(vocab) the model first")


def new_outer(
    weights: Mapping[str, Any], tokens: Mapping[str, Sequence[int]], modules: Collection[str]
) -> dict[str, Any]:
    """Return the rows and the modules as they are now, in float32 or wider, by their names."""
    parameters = {}
    for name, ids in tokens.items():
        table: Any = weights[name]
        with device_of(table):
            rows = table[to_device_of(np.asarray(ids, np.int64), table)]
            parameters[rows_name(name)] = rows.astype(np.promote_types(table.dtype, FLOAT32))
    for name in (name for module in modules for name in OUTER[module] if name in weights):
        whole: Any = weights[name]
        with device_of(whole):
            parameters[ADAPTED + name] = whole.astype(np.promote_types(whole.dtype, FLOAT32))
    return parameters


def replaced(
    parameters: Mapping[str, Any], own: Mapping[str, Any], tokens: Mapping[str, Sequence[int]]
) -> dict[str, Any]:
    """Return parameters in which an adapter's rows and modules are in their places.

    ``own`` are the adapter's; those that ``parameters`` holds too, as on a tape, come from there.
    """
    result = dict(parameters)
    for name, kept in parameters.items():
        if name not in FULL:
            continue
        array = kept.value if type(kept) is Var else kept
        rows, whole = rows_name(name), ADAPTED + name
        if whole in own:
            value = parameters.get(whole, own[whole])
            plain = value.dtype == array.dtype
            result[name] = value if plain else in_place_of(value, array.dtype, lambda each: each)
        elif name in tokens:
            places = to_device_of(np.asarray(tokens[name], np.int64), array)
            make = partial(ReplacedRows, array, places)
            result[name] = in_place_of(parameters.get(rows, own[rows]), array.dtype, make)
    return result


def merged(name: str, weight: Any, own: Mapping[str, Any], tokens: Mapping[str, Any]) -> Any:
    """Return a parameter with the adapter's rows or module in its place; None: it has neither."""
    if ADAPTED + name in own:
        return own[ADAPTED + name].astype(weight.dtype)
    if name not in tokens:
        return None
    result = weight.copy()
    places = to_device_of(np.asarray(tokens[name], np.int64), weight)
    result[places] = own[rows_name(name)].astype(weight.dtype)
    return result


def resized(table: Any, rows: int) -> Any:
    """Return a table with more rows, each the mean of the old ones, or with fewer."""
    with device_of(table):
        result = np.empty_like(table, shape=(rows, *table.shape[1:]))
        result[: len(table)] = table[:rows]
        if rows > len(table):
            wide = np.promote_types(table.dtype, FLOAT32)
            result[len(table) :] = table.mean(axis=0, dtype=wide).astype(table.dtype)
    return result


# ---- on a tape ----------------------------------------------------------------------------------
def in_place_of(own: Any, dtype: Any, make: Callable[[Array], Any]) -> Any:
    """Return ``make(own in a dtype)``, on the tape of own if that is a Var.

    The gradient of the result is that of own, but for its dtype.
    """
    if type(own) is not Var:
        return make(own.astype(dtype, copy=False))
    result = Var(make(own.value.astype(dtype, copy=False)), own.tape)
    own.tape.note(SameRecord({"own": own.value}, {"own": own.index}, {"weight": result.index}))
    return result


class SameRecord(NamedTuple):
    """A tape entry of a weight that is made of an array, and passes its gradient to that."""

    values: dict[str, Any]
    inputs: dict[str, int]
    outputs: dict[str, int]

    def add_back(self, take: dict[str, Any], inputs: dict[str, int], grads: Gradients) -> None:
        """Add the gradient, in the dtype of the array."""
        index, dtype = self.inputs["own"], self.values["own"].dtype
        grads[index] = add_up(grads.get(index), take["weight"].astype(dtype, copy=False))


def embedding_of(tokens: Array, table: Any) -> Any:
    """Return ``embedding(tokens, table)``, also of a table with replaced rows."""
    value = table.value if type(table) is Var else table
    if not isinstance(value, ReplacedRows):
        return embedding(tokens, table)
    x, replaced, number = value.embedded(tokens)
    if type(table) is not Var:
        return x
    result = Var(x, table.tape)
    values = {"replaced": replaced, "number": number, "rows": value.rows}
    table.tape.note(RowsRecord(values, {"weight": table.index}, {"x": result.index}))
    return result


class RowsRecord(NamedTuple):
    """A tape entry of an embedding with replaced rows."""

    values: dict[str, Any]
    inputs: dict[str, int]
    outputs: dict[str, int]

    def add_back(self, take: dict[str, Any], inputs: dict[str, int], grads: Gradients) -> None:
        """Add the gradient of the replaced rows."""
        replaced, number, rows = (self.values[name] for name in ("replaced", "number", "rows"))
        back: Any = embedding.backward
        _, drows = back(np.where(replaced, take["x"], 0), number, rows)
        index = self.inputs["weight"]
        grads[index] = add_up(grads.get(index), drows)
