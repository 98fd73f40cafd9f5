"""What an engine requires of a model: a callable that computes the new tokens of rows."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from ..core.dtypes import Array
from ..inference.page_pools import PagePools


class Work(NamedTuple):
    """The new tokens of a row in one step."""

    sequence: int  # of the cache
    tokens: Array  # (count,) int, on the host
    length: int  # number of all tokens of the row: angles of longrope depend on it
    slot: int  # of the row's states
    adapter: str | None  # name; None: no adapter; "": the model's active adapter
    source: int = (
        -1
    )  # place of the only token among those passed to ``send``; -1: ``tokens`` has it
    checked: int = 1  # number of last tokens whose logits are computed


class Computed(NamedTuple):
    """The results of a step."""

    logits: Array  # after each row's last token, or its last ``checked`` tokens, (rows, vocab)
    routes: list[Array] | None  # the experts of each row's new tokens, on the host
    chosen: Any  # of a greedy step, the most likely tokens, -1 for logits with NaN; else None


class States(Protocol):
    """The states of layers without attention, which each row has beside its pages."""

    def clear(self, slot: int) -> None:
        """Set the states of a slot to the initial states."""

    def taken(self, slot: int) -> Any:
        """Return a copy of the states of a slot."""

    def put(self, slot: int, states: Any) -> None:
        """Store states, which ``taken`` returned, in a slot."""


class Decoder(Protocol):
    """The computation of steps, with the caches of all rows and their adapters by name.

    ``shares`` is whether rows may share pages of equal prefixes, ``repeats`` whether a row's tokens
    may be computed again with the same results.  From ``switch`` tokens on, if not None, a row has
    other rotary angles for all tokens.  ``ahead`` is whether a step may begin before the host has
    the tokens of the step before.  ``computed`` is the number of tokens computed so far.
    """

    cache: PagePools
    adapters: dict[str, Any]
    states: States | None
    switch: int | None
    shares: bool
    repeats: bool
    ahead: bool
    vocab: int
    invariant: bool
    softcap: float | None
    computed: int

    def __call__(self, work: Sequence[Work], greedy: bool = False) -> Computed:
        """Compute the new tokens of rows; ``greedy``: also choose and ``send`` the next tokens."""

    def send(self, tokens: Array) -> None:
        """Pass on tokens, (rows,) on the device: ``source`` of later work is a place in them."""

    def drawn_from(self, logits: Array) -> Any:
        """Return the logits that tokens are drawn from."""
