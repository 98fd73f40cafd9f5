"""Adapters of tables and whole modules: rows for tokens, modules, low-rank weights.

    base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta    new rows of tokens
    base_model.model.lm_head.weight                                             a whole module
    base_model.model.model.layers.0.input_layernorm.weight                      a block's module
    base_model.model.lm_head.lora_A.weight, .lora_B.weight                      low-rank weights
    base_model.model.model.embed_tokens.lora_embedding_A, .lora_embedding_B     A^T B^T is added

adapter_config.json lists the tokens in ``trainable_token_indices``, the modules in
``modules_to_save``.  A tied head uses the changed table.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ...core.call import is_integer, is_list
from ...core.dtypes import FLOAT32, Array
from ...core.gpu import device_of
from ...errors import ConfigError
from ...ops.linear.changed_matrix import AddedLowRank, ChangedMatrix, ReplacedRows
from ...ops.linear.embedding import embedding
from ...placement import to_device_of
from ...training.tape import Gradients, add_up
from ...training.variable import Var
from ..configs.config import Config
from ..configs.draft_heads import without_heads
from ..configs.names import ADAPTED, HEAD, SCORE, SCORE_BIAS, TABLE, stored_name

ROWS = "token_adapter.trainable_tokens_delta"
TOKENS, MODULES, TIED = "trainable_token_indices", "modules_to_save", "ensure_weight_tying"
LOW_RANK = {  # names of the two tensors, by table
    TABLE: tuple(f"{ADAPTED}model.embed_tokens.lora_embedding_{part}" for part in "AB"),
    HEAD: tuple(f"{ADAPTED}lm_head.lora_{part}.weight" for part in "AB"),
}
OUTER = {"embed_tokens": (TABLE,), "lm_head": (HEAD,), "score": (SCORE, SCORE_BIAS)}


def listed_tokens(call: str, listed: Any) -> dict[str, tuple[int, ...]]:
    """Return the trained tokens by table; ``listed`` has token ids, or token ids by module.

    Raises
    ------
    ConfigError
        An entry is not a token id, is listed twice, or belongs to another module; the message
        begins with ``call``.
    """
    by_module = listed if isinstance(listed, Mapping) else {"embed_tokens": listed}
    tokens = {}
    for module, ids in by_module.items():
        own = str(module).rpartition(".")[2]
        if own not in ("embed_tokens", "lm_head"):
            problem = f"{call}: {module!r} is not a table of tokens"
            raise ConfigError(f"{problem}; choose embed_tokens or lm_head")
        many = isinstance(ids, Sequence | np.ndarray) and is_list(ids)
        known: list[Any] = [*ids] if many else [None]
        if not all(map(is_integer, known)):
            raise ConfigError(f"{call}: {str(ids)[:80]} is not a list of token ids, 0 or more")
        if len({*known}) < len(known):
            duplicate = next(each for each in known if known.count(each) > 1)
            raise ConfigError(f"{call}: token {duplicate} is listed twice; list each once")
        if known:
            tokens[OUTER[own][0]] = tuple(map(int, known))
    return tokens


def listed_modules(settings: Mapping[str, Any]) -> set[str]:
    """Return the last components of the modules in ``modules_to_save``."""
    return {str(each).rpartition(".")[2] for each in settings.get(MODULES) or []}


def inner_modules(call: str, config: Config, settings: Mapping[str, Any]) -> set[str]:
    """Return the parameters of ``modules_to_save``, except tables and heads.

    As in peft, an entry selects every module whose name ends with it: norm selects the last norm
    and all norms of the blocks.

    Raises
    ------
    ConfigError
        No module has this name; the message begins with ``call``.
    """
    names = set[str]()
    for listed in map(str, settings.get(MODULES) or []):
        if listed.rpartition(".")[2] in (*OUTER, "classifier"):  # peft adds classifier to the heads
            continue
        end = re.compile(rf"{re.escape(listed)}\.")
        every = without_heads(config).shapes()  # draft heads stay frozen beside an adapter
        own = {name for name in every if end.search(stored_name(name, config.body))}
        if not own:
            problem = f"{MODULES} names {listed[:200]!r}, and no module of this model ends with it"
            cure = "pass the model that the adapter is for"
            if config.delta is not None and re.fullmatch(r"(.*\.)?[qkv]_conv1d", listed):
                problem = f"{MODULES} names {listed[:200]!r}, which is now a part of conv1d"
                cure = "merge the adapter with the version of transformers that wrote it"
            raise ConfigError(f"{call}: {problem}; {cure}")
        names |= own
    return names


def rows_name(name: str) -> str:
    """Return the name of a table's trained rows in an adapter."""
    return f"{ADAPTED}{name.removesuffix('weight')}{ROWS}"


def outer_settings(
    config: Config, tokens: Mapping[str, Sequence[int]], modules: Collection[str], tables: Any
) -> dict[str, Any]:
    """Return the entries of adapter_config.json for tokens, modules and tables."""
    settings: dict[str, Any] = {}
    if tokens:
        settings[TOKENS] = {name.split(".")[-2]: [*ids] for name, ids in tokens.items()}
    if modules:
        settings[MODULES] = sorted(set(modules))
    if config.tied and "embed_tokens" in (*modules, *tables):
        settings[TIED] = True
    return settings


def check_outer(
    call: str, config: Config, tokens: Mapping[str, Sequence[int]], modules: Collection[str]
) -> None:
    """Raise a ConfigError for unknown tokens or modules, or a module that is trained twice."""
    tables = {name: module for module, names in OUTER.items() for name in names}
    shapes = config.shapes()
    known = [module for module, names in OUTER.items() if names[0] in shapes]
    for module in (*modules, *(tables[name] for name in tokens)):
        if module in known:
            continue
        cure = f"choose from {', '.join(known)}"
        if module == "lm_head" and config.tied:
            cure = "it is tied to embed_tokens: name embed_tokens alone"
        if module == "score":
            cure = "only classifiers have it: load the folder with head= and labels="
        raise ConfigError(f"{call}: {module!r} is not a module of this model; {cure}")
    for name, ids in tokens.items():
        if tables[name] in modules:
            problem = f"{call}: {tables[name]} is trained whole, and also some of its rows"
            raise ConfigError(f"{problem}; leave out tokens, or the module")
        if max(ids) >= config.vocab:
            problem = f"{call}: token {max(ids)} is outside the vocabulary of {config.vocab}"
            raise ConfigError(f"{problem}; resize(vocab) the model first")


def new_outer(
    weights: Mapping[str, Any], tokens: Mapping[str, Sequence[int]], modules: Collection[str]
) -> dict[str, Any]:
    """Return the current rows and modules, in float32 or wider, by name in an adapter."""
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


def low_rank(name: str, first: Any, second: Any) -> tuple[Any, Any]:
    """Return (a, b) of a table's update scale b a from its two tensors, or the reverse."""
    return (second.T, first.T) if name == TABLE else (first, second)


def new_low_rank(
    weights: Mapping[str, Any], name: str, rank: int, seed: Sequence[int]
) -> dict[str, Any]:
    """Return two tensors for an update of a table that is 0: a is random, b is zero."""
    (vocab, hidden), draw = weights[name].shape, np.random.default_rng(seed)
    bound = hidden**-0.5
    a: Any = draw.uniform(-bound, bound, (rank, hidden)).astype(FLOAT32)
    pair = low_rank(name, a, np.zeros((vocab, rank), FLOAT32))
    own = [to_device_of(np.ascontiguousarray(each), weights[name]) for each in pair]
    return dict(zip(LOW_RANK[name], own, strict=True))


def replaced(
    parameters: Mapping[str, Any],
    own: Mapping[str, Any],
    tokens: Collection[str],
    scales: Mapping[str, float],
    places: Callable[[str, Any], Any],
) -> dict[str, Any]:
    """Return parameters with an adapter's rows, modules and low-rank updates applied.

    ``own`` are the adapter's parameters; if ``parameters`` also has them, for example on a tape,
    these are used.  ``places(name, table)`` returns the rows of ``tokens`` in a table.
    """
    result = dict(parameters)
    for name, kept in parameters.items():
        array = kept.value if type(kept) is Var else kept
        rows, whole = rows_name(name), ADAPTED + name
        if whole in own:
            value = parameters.get(whole, own[whole])
            plain = value.dtype == array.dtype
            result[name] = value if plain else made_of([value], array.dtype, lambda each: each)
        elif name in tokens:
            make = partial(ReplacedRows, array, places(name, array))
            result[name] = made_of([parameters.get(rows, own[rows])], array.dtype, make)
        elif name in LOW_RANK and LOW_RANK[name][0] in own:
            pair = [parameters.get(each, own[each]) for each in LOW_RANK[name]]
            scale = scales[name.removesuffix(".weight")]
            result[name] = made_of(pair, array.dtype, partial(_added, name, array, scale), name)
    return result


def _added(name: str, array: Any, scale: float, first: Any, second: Any) -> AddedLowRank:
    """Return a table with the low-rank update of two tensors."""
    return AddedLowRank(array, *low_rank(name, first, second), scale)


def merged(name: str, weight: Any, own: Mapping[str, Any], tokens: Mapping[str, Any]) -> Any:
    """Return a parameter with the adapter's rows or module merged; None if there are none."""
    if ADAPTED + name in own:
        return own[ADAPTED + name].astype(weight.dtype)
    if name not in tokens:
        return None
    result = weight.copy()
    places = to_device_of(np.asarray(tokens[name], np.int64), weight)
    result[places] = own[rows_name(name)].astype(weight.dtype)
    return result


def resized(table: Any, rows: int) -> Any:
    """Return a table with fewer rows, or with more: each new row is the mean of the old rows."""
    with device_of(table):
        result = np.empty_like(table, shape=(rows, *table.shape[1:]))
        result[: len(table)] = table[:rows]
        if rows > len(table):
            wide = np.promote_types(table.dtype, FLOAT32)
            result[len(table) :] = table.mean(axis=0, dtype=wide).astype(table.dtype)
    return result


# ---- on a tape ----------------------------------------------------------------------------------
def made_of(own: Sequence[Any], dtype: Any, make: Callable[..., Any], table: str = "") -> Any:
    """Return ``make(*own)`` with the arrays in a dtype, on the tape of the Vars among them.

    The gradient of an array is the leading part of the result's gradient.  With ``table``, the
    result's gradient holds the gradients of the table's two tensors.
    """
    arrays = [each.value if type(each) is Var else each for each in own]
    result = make(*(array.astype(dtype, copy=False) for array in arrays))
    tape = next((each.tape for each in own if type(each) is Var), None)
    if tape is None:
        return result
    var = Var(result, tape)
    values = {"made": result, **{str(i): array for i, array in enumerate(arrays)}}
    inputs = {str(i): each.index for i, each in enumerate(own) if type(each) is Var}
    tape.note(MadeRecord(values, inputs, {"weight": var.index}, table))
    return var


class MadeRecord(NamedTuple):
    """A tape entry of a weight that is computed from arrays; they receive its gradient."""

    values: dict[str, Any]
    inputs: dict[str, int]
    outputs: dict[str, int]
    table: str

    def add_back(self, take: dict[str, Any], inputs: dict[str, int], grads: Gradients) -> None:
        """Add the gradients, in the dtypes of the arrays."""
        gradient = take["weight"]
        weight = self.values["made"]
        pair = low_rank(self.table, *weight.parts(gradient)) if self.table else (gradient,)
        for name, index in inputs.items():
            array = self.values[name]
            own = pair[int(name)][tuple(map(slice, array.shape))]  # all, or the leading part
            own = own.astype(array.dtype, copy=False)
            grads[index] = add_up(grads.get(index), own)


def embedding_of(tokens: Array, table: Any) -> Any:
    """Return ``embedding(tokens, table)``, also of a table with replaced rows."""
    value = table.value if type(table) is Var else table
    if not isinstance(value, ChangedMatrix):
        return embedding(tokens, table)
    x = value.embedded(tokens)
    if type(table) is not Var:
        return x
    result = Var(x, table.tape)
    values = {"tokens": tokens, "table": value}
    table.tape.note(EmbeddedRecord(values, {"weight": table.index}, {"x": result.index}))
    return result


class EmbeddedRecord(NamedTuple):
    """A tape entry of the embedding with a changed table."""

    values: dict[str, Any]
    inputs: dict[str, int]
    outputs: dict[str, int]

    def add_back(self, take: dict[str, Any], inputs: dict[str, int], grads: Gradients) -> None:
        """Add the gradient of the changes."""
        index, table = self.inputs["weight"], self.values["table"]
        gradient = table.embedded_gradient(take["x"], self.values["tokens"])
        grads[index] = add_up(grads.get(index), gradient)
