"""Context parallelism: ranks divide the tokens of each row, and attend to the tokens of all ranks.

Rows are padded to a multiple of the ranks (ring: of twice the ranks) with copies of the last token,
which predict nothing and which no token of a text sees.

    ring       tokens in the zigzag order of ``ring_order``; keys and values pass from rank to rank
    ulysses    each rank has consecutive tokens, and attends with some of the heads to all tokens
"""

from typing import Any, NamedTuple, Self

import numpy as np

from ...core.arrays import zeroed
from ...core.dtypes import Array
from ...core.stand_in import is_planned
from ...errors import ConfigError
from ...parallel.communicator import Communicator, part
from ...parallel.ring import ring_attention, ring_order
from ...parallel.taped import taped, value_of
from ...parallel.tensor import all_to_all
from ...parallel.ulysses import ulysses_attention
from ...placement import to_device_of, to_numpy
from .elements import taken
from .positions import Places

KINDS: dict[str, Any] = {"ring": ring_attention, "ulysses": ulysses_attention}


class Context(NamedTuple):
    """The tokens of this rank, which are the same columns of all rows."""

    comm: Communicator
    order: Array  # index in the row of each token; length or more for padding
    length: int  # tokens of a row
    offsets: Array | None  # starts of the texts packed into the row, on the host
    kind: str

    @classmethod
    def of(
        cls, comm: Communicator | None, tokens: Any, mask: Any, offsets: Any, kind: str = "ring"
    ) -> Self | None:
        """Return which tokens this rank holds; None if ranks do not divide them.

        Raises
        ------
        ConfigError
            There is a mask, or the kind is unknown.
        """
        if comm is None or comm.size == 1:
            return None
        if mask is not None:
            cure = "pack texts with offsets, or give padding labels of -100"
            raise ConfigError(f"Transformer: a mask cannot be divided among ranks; {cure}")
        length = int(tokens.shape[1] if offsets is None else tokens.size)
        if kind not in KINDS:
            problem = f"Transformer: context_attention {kind!r} is not known"
            raise ConfigError(f"{problem}; choose from {', '.join(KINDS)}")
        step = comm.size * (2 if kind == "ring" else 1)
        padded = -(-length // step) * step
        texts = None if offsets is None else to_numpy(offsets)
        if texts is not None and padded > length:
            texts = np.append(texts, padded)
        consecutive = np.arange(padded)[part(padded, comm)]
        order = ring_order(padded, comm, causal=True) if kind == "ring" else consecutive
        return cls(comm, order, length, texts, kind)

    def own(self, x: Any) -> Any:
        """Return this rank's columns of (rows, tokens), padded with the last column."""
        return x[:, to_device_of(self.order.clip(max=max(self.length - 1, 0)), x)]

    def whole(self, own: Any) -> Any:
        """Return (rows, tokens, ...) of all ranks; its gradient is the sum of those of all."""
        columns = to_device_of(self.order, value_of(own))
        kept = columns < self.length

        def spread(x: Any) -> Any:
            full = np.zeros_like(x, shape=(len(x), self.length, *x.shape[2:]))
            full[:, columns[kept]] = x[:, kept]
            return self.comm.all_reduce(full)

        def back(dy: Any, wanted: Any) -> dict[str, Any]:
            dx = self.own(self.comm.all_reduce(dy))
            return {"own": zeroed(dx, np.broadcast_to(kept, dx.shape[:2]))}

        value = value_of(own)
        flags = value.dtype.kind == "b"
        y = spread(value.astype(np.int32)) != 0 if flags else spread(value)
        return y if flags else taped("log_probs", y, back, own=own)

    def places(self, all_places: Places) -> Places:
        """Return the places of this rank's tokens, out of those of all tokens."""
        positions = all_places.positions
        if positions is None:
            like = next(iter(all_places.tables.values()))[0]
            positions = to_device_of(np.arange(self.length)[None], like)
        return all_places._replace(positions=self.own(positions), offsets=None)

    def by_heads(self, x: Any) -> Any:
        """Return (rows, tokens, heads, ...) of all tokens in order and of this rank's heads."""
        x = all_to_all(x, 2, 1, self.comm)
        return x if self.kind != "ring" else taken(x, to_device_of(self._at(), value_of(x)), 1)

    def by_tokens(self, x: Any) -> Any:
        """Return what ``by_heads`` was given: this rank's tokens, with all heads."""
        if self.kind == "ring":
            x = taken(x, to_device_of(np.argsort(self._at()), value_of(x)), 1)
        return all_to_all(x, 1, 2, self.comm)

    def _at(self) -> Array:
        """Return where each token of a row is among those of all ranks, one rank after another."""
        pieces = np.arange(len(self.order) * self.comm.size).reshape(2 * self.comm.size, -1)
        both = [each for pair in zip(pieces, pieces[::-1], strict=True) for each in pair]
        at: Array = np.argsort(np.concatenate(both[: len(pieces)]))
        return at

    def attend(self, layer: int, q: Any, k: Any, v: Any, **options: Any) -> Any:
        """Return the attention of this rank's queries over the keys of all ranks."""
        return KINDS[self.kind](q, k, v, self.comm, offsets=self.offsets, **options)


def is_left_aligned(mask: Any) -> bool:
    """Return whether all padding of rows is on the right; planned rows have none."""
    if is_planned(mask):
        return True
    real = to_numpy(mask) != 0
    return not (real[:, 1:] & ~real[:, :-1]).any()


def own_tokens(context: Context | None, tokens: Array) -> Array:
    """Return this rank's columns of (rows, tokens): of tokens, or of the labels they predict."""
    return tokens if context is None else context.own(tokens)


def token_numbers(context: Context | None, tokens: Array, first: int) -> Array | None:
    """Return the number in the batch of all ranks of each of this rank's tokens, (rows, tokens).

    ``tokens`` are whole rows, whose first token has the number ``first``.  None: they are 0, 1, 2
    and so on.
    """
    if context is None and first == 0:
        return None
    numbers = np.arange(first, first + tokens.size, dtype=np.int32, like=tokens)
    return own_tokens(context, numbers.reshape(tokens.shape))


def real_tokens(context: Context | None, mask: Array | None, like: Array) -> Array | None:
    """Return which of this rank's tokens are real, (rows, tokens): those of the mask; None: all.

    With a context, which has no mask, those that do not fill up the rows of ``like``.
    """
    if context is None:
        return mask
    kept = to_device_of(context.order < context.length, like)
    return np.broadcast_to(kept, (len(like), len(kept)))
