"""What all blocks of one call share."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ...core.dtypes import Array
from ...parallel.communicator import Communicator
from ..adapters.adapter_stacks import Adapted
from ..configs.config import Config
from ..ranks.division import Division
from .context import Context

Attend = Callable[..., Array]  # (layer, q, k, v, **options of attention): see attending.py
Turn = Callable[..., tuple[Any, Any]]  # (layer, q, k, v, cos, sin, positions)
Project = Callable[[Mapping[str, Any], Sequence[str], Any], list[Any]]  # (parameters, names, x)
Whole = Callable[[Mapping[str, Any], str], Any]  # (parameters, name): a weight with its adapter
Gather = Callable[[Mapping[str, Any]], dict[str, Any]]


class Latents(NamedTuple):
    """A cache of latent rows, in which a layer may hold rows already."""

    begins: Callable[[int], bool]  # (layer) whether it holds none
    append: Callable[..., Any]  # (layer, rows, None)
    attend: Attend


def unkept(*_: Any) -> tuple[None, None]:
    """Return that a layer has no state before the first token; keep none."""
    return None, None


class Attention(NamedTuple):
    """What branches with attention take.

    ``tables`` are cos and sin by layer type, and those of queries where they differ.
    """

    attend: Attend  # of these tokens: to each other, or to a cache as well
    tables: Mapping[str, tuple[Any, ...]]
    positions: Any = None  # (batch, tokens); None: the rows of the tables, in order
    turn: Turn | None = None  # rotates q and k, in place of rope_qk; returns None for a stored k
    latents: Latents | None = None  # the cache, if it holds latent rows
    whole: Whole = lambda parameters, name: parameters[name]


class Mixtures(NamedTuple):
    """What layers with experts take."""

    stacks: Mapping[str, Adapted] = {}  # those that have an adapter
    routers: list[Any] | None = None  # takes what every router says; None: nobody reads it
    routes: Any = None  # (batch, tokens, layers with experts, k): experts that were chosen before
    ranks: Communicator | None = None  # that hold different experts


class Recurrence(NamedTuple):
    """What layers with states take."""

    states: Any = unkept  # (layer) -> two, (layer, tokens, *two)
    mask: Any = None  # of tokens that are not padding
    offsets: Any = None  # of packed texts


class Call(NamedTuple):
    """The inputs that all blocks of one call share, and those of each kind of branch."""

    config: Config
    parameters: Mapping[str, Any]  # also those of an adapter
    project: Project  # the outputs of linear layers: plain, adapted or rounded
    attention: Attention
    experts: Mixtures = Mixtures()
    recurrence: Recurrence = Recurrence()
    chunked_mlp: bool = False
    division: Division | None = None  # among ranks; config and parameters are this rank's part
    gather: Gather | None = None  # gathers the parameters of a block from the parts of all ranks
    context: Context | None = None  # of ranks that divide the tokens

    def options(self, layer: int) -> dict[str, Any]:
        """Return the options of the attention of a layer."""
        window = self.config.window_of(layer)  # it counts the query itself
        options: dict[str, Any] = {"causal": True, "scale": self.config.scale}
        options |= {"softcap": self.config.softcap}
        return options | {"window": None if window is None else (window - 1, 0)}
