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


class Call(NamedTuple):
    """The inputs that all blocks of one call share.

    ``tables`` are cos and sin by layer type, and those of queries where they differ.
    """

    config: Config
    parameters: Mapping[str, Any]  # also those of an adapter
    tables: Mapping[str, tuple[Any, ...]]
    attend: Attend  # the attention of these tokens: to each other, or to a cache as well
    project: Project  # the outputs of linear layers: plain, adapted or rounded
    positions: Any = None  # (batch, tokens); None: the rows of the tables, in order
    chunked_mlp: bool = False
    division: Division | None = None  # among ranks; config and parameters are this rank's part
    turn: Turn | None = None  # rotates q and k, in place of rope_qk; returns None for a stored k
    gather: Gather | None = None  # gathers the parameters of a block from the parts of all ranks
    stacks: Mapping[str, Adapted] = {}  # those of experts that have an adapter
    mask: Any = None  # of tokens that are not padding
    offsets: Any = None  # of packed texts
    context: Context | None = None  # of ranks that divide the tokens
    states: Any = unkept  # of layers without attention: (layer) -> two, (layer, tokens, *two)
    routers: list[Any] | None = None  # takes what every router says; None: nobody reads it
    routes: Any = None  # (batch, tokens, layers with experts, k): experts that were chosen before
    latents: Latents | None = None  # the cache, if it holds latent rows
    expert_ranks: Communicator | None = None  # that hold different experts
    whole: Whole = lambda parameters, name: parameters[name]

    def options(self, layer: int) -> dict[str, Any]:
        """Return the options of the attention of a layer."""
        window = self.config.window_of(layer)  # it counts the query itself
        options: dict[str, Any] = {"causal": True, "scale": self.config.scale}
        options |= {"softcap": self.config.softcap}
        return options | {"window": None if window is None else (window - 1, 0)}
