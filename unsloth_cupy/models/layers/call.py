"""The inputs that all blocks of one call share."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ...core.dtypes import Array
from ...parallel.communicator import Communicator
from ..adapters.adapter_stacks import Adapted
from ..configs.config import Config
from ..configs.names import ADAPTED
from ..ranks.division import Division
from .context import Context

Attend = Callable[..., Array]  # (layer, q, k, v, **options of attention): see attending.py
Turn = Callable[..., tuple[Any, Any]]  # (layer, q, k, v, cos, sin, positions)
Project = Callable[..., list[Any]]  # (parameters, names, x, part=slice): x is a part of all rows
Whole = Callable[[Mapping[str, Any], str], Any]  # (parameters, name): a weight with its adapter
Gather = Callable[[Mapping[str, Any]], dict[str, Any]]


class Latents(NamedTuple):
    """The functions of a cache that stores latent rows."""

    begins: Callable[[int], bool]  # (layer) whether the cache has no rows of the layer yet
    append: Callable[..., Any]  # (layer, rows, None)
    attend: Attend
    index_keys: Callable[..., Any]  # (layer, keys of new tokens, most): see PackedRows


def no_states(*_: Any) -> tuple[None, None]:
    """Return no initial states, and store none: there is no cache."""
    return None, None


class Keys(NamedTuple):
    """How keys and values are stored, and those that layers share."""

    turn: Turn | None = None  # rotates q and k, in place of rope_qk; returns None for a stored k
    latents: Latents | None = None  # the cache, if it holds latent rows
    cached: bool = False  # whether ``attend`` stores keys and values, of one size for all layers
    padding: Any = None  # (batch, 1, 1, keys) True where keys are not padding; None: no padding
    # what later layers use: keys and values by layer type, an output of experts
    shared: dict[str, Any] | None = None


class Attention(NamedTuple):
    """The inputs of attention branches.

    ``tables`` are (cos, sin) by layer type; (cos, sin, cos of queries, sin of queries) if queries
    have tables of their own.
    """

    attend: Attend  # attention among these tokens, and to the tokens of a cache
    tables: Mapping[str, tuple[Any, ...]]
    positions: Any = None  # (batch, tokens); None: the rows of the tables, in order
    keys: Keys = Keys()
    whole: Whole = lambda parameters, name: parameters[name]
    of_chunks: Any = None  # as ``attend``, in layers whose queries see their chunk only


class Mixtures(NamedTuple):
    """The inputs of layers with experts."""

    stacks: Mapping[str, Adapted] = {}  # stacks with an adapter, by name
    routers: list[Any] | None = None  # to which every layer adds its ``Routed``; None: not needed
    routes: Any = None  # (batch, tokens, layers with experts, k): experts of an earlier pass
    ranks: Communicator | None = None  # which hold different experts


class Recurrence(NamedTuple):
    """The inputs of layers with recurrent states."""

    states: Any = no_states  # (layer) returns two states; (layer, tokens, *two) stores them
    mask: Any = None  # True where a token is not padding
    offsets: Any = None  # starts of packed texts


class Call(NamedTuple):
    """The inputs of one call: common inputs of all blocks, and inputs of each kind of branch."""

    config: Config
    parameters: Mapping[str, Any]  # of the model and of its adapter
    project: Project  # the outputs of linear layers: plain, adapted or rounded
    attention: Attention
    experts: Mixtures = Mixtures()
    recurrence: Recurrence = Recurrence()
    chunked_mlp: bool | None = None
    division: Division | None = None  # with it, config and parameters are this rank's part
    gather: Gather | None = None  # gathers the parameters of a block from the parts of all ranks
    context: Context | None = None  # if ranks divide the tokens

    def options(self, layer: int) -> dict[str, Any]:
        """Return the options of a layer's attention."""
        window = self.config.window_of(layer)  # counts the query itself; attention's does not
        options: dict[str, Any] = {"causal": self.config.causal, "scale": self.config.scale}
        options |= {"softcap": self.config.softcap}
        if not self.config.causal:  # the window of an encoder is a distance, to both sides
            return options | {"window": None if window is None else (window, window)}
        return options | {"window": None if window is None else (window - 1, 0)}


def parameters_of(call: Call, module: str) -> dict[str, Any]:
    """Return the parameters of a module and of its adapters."""
    prefixes = module, ADAPTED + module
    return {name: each for name, each in call.parameters.items() if name.startswith(prefixes)}
