"""Context parallelism: ranks divide the tokens of each row, and attend to the tokens of all ranks.

Rows are padded to a multiple of the world size (ring: twice the world size) with copies of the
last token.  Padding has no labels, and no token of a text attends to it.

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
    """The tokens of this rank: the same columns of all rows."""

    comm: Communicator
    order: Array  # column of each token in the whole row; padding has ``length`` or more
    length: int  # tokens per row
    offsets: Array | None  # starts of the texts packed into the row, on the host
    kind: str

    @classmethod
    def of(
        cls, comm: Communicator | None, tokens: Any, mask: Any, offsets: Any, kind: str = "ring"
    ) -> Self | None:
        """Return the context of this rank; None if ranks do not divide tokens.

        Raises
        ------
        ConfigError
            A mask is passed, or the kind is unknown.
        """
        if comm is None or comm.size == 1:
            return None
        if mask is not None:
            cure = "pack texts with offsets, or give padding labels of -100"
            raise ConfigError(f"Transformer: a mask cannot be divided among ranks; {cure}")
        length = int(tokens.shape[1] if offsets is None else tokens.size)
        if kind not in KINDS:
            problem = f"Transformer: context_attention {kind!r} is unknown"
            raise ConfigError(f"{problem}; choose from {', '.join(KINDS)}")
        step = comm.size * (2 if kind == "ring" else 1)  # in zigzag order a rank has two pieces
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
        """Return (rows, tokens, ...) of all ranks; backward adds up the gradients of all ranks."""
        columns = to_device_of(self.order, value_of(own))
        real = columns < self.length

        def spread(x: Any) -> Any:
            full = np.zeros_like(x, shape=(len(x), self.length, *x.shape[2:]))
            full[:, columns[real]] = x[:, real]
            return self.comm.all_reduce(full)  # other ranks have zeros in these columns

        def back(dy: Any, wanted: Any) -> dict[str, Any]:
            dx = self.own(self.comm.all_reduce(dy))
            return {"own": zeroed(dx, np.broadcast_to(real, dx.shape[:2]))}

        value = value_of(own)
        flags = value.dtype.kind == "b"
        y = spread(value.astype(np.int32)) != 0 if flags else spread(value)
        return y if flags else taped("log_probs", y, back, own=own)

    def places(self, all_places: Places) -> Places:
        """Return positions and tables of this rank's tokens."""
        positions = all_places.positions
        if positions is None:
            like = next(iter(all_places.tables.values()))[0]
            positions = to_device_of(np.arange(self.length)[None], like)
        return all_places._replace(positions=self.own(positions), offsets=None)

    def by_heads(self, x: Any) -> Any:
        """Exchange tokens for heads: return all tokens in order, with this rank's heads.

        x is (rows, tokens, heads, ...).
        """
        x = all_to_all(x, 2, 1, self.comm)
        return x if self.kind != "ring" else taken(x, to_device_of(self._at(), value_of(x)), 1)

    def by_tokens(self, x: Any) -> Any:
        """Undo ``by_heads``: return this rank's tokens, with all heads."""
        if self.kind == "ring":
            x = taken(x, to_device_of(np.argsort(self._at()), value_of(x)), 1)
        return all_to_all(x, 1, 2, self.comm)

    def _at(self) -> Array:
        """Return the index of each token of a row in the tokens of all ranks, rank after rank."""
        pieces = np.arange(len(self.order) * self.comm.size).reshape(2 * self.comm.size, -1)
        both = [each for pair in zip(pieces, pieces[::-1], strict=True) for each in pair]
        at: Array = np.argsort(np.concatenate(both[: len(pieces)]))
        return at

    def attend(self, layer: int, q: Any, k: Any, v: Any, **options: Any) -> Any:
        """Return the attention of this rank's queries over the keys of all ranks."""
        return KINDS[self.kind](q, k, v, self.comm, offsets=self.offsets, **options)


def is_left_aligned(mask: Any) -> bool:
    """Return whether all padding is on the right; True in a plan, whose masks have no values."""
    if is_planned(mask):
        return True
    real = to_numpy(mask) != 0
    return not (real[:, 1:] & ~real[:, :-1]).any()


def own_tokens(context: Context | None, tokens: Array) -> Array:
    """Return this rank's columns of tokens or labels, (rows, tokens)."""
    return tokens if context is None else context.own(tokens)


def token_numbers(context: Context | None, tokens: Array, first: int) -> Array | None:
    """Return the numbers of this rank's tokens in the batch of all ranks, (rows, tokens).

    ``tokens`` are whole rows; their first token has the number ``first``.  None stands for the
    numbers 0, 1, 2 and so on.
    """
    if context is None and first == 0:
        return None
    numbers = np.arange(first, first + tokens.size, dtype=np.int32, like=tokens)
    return own_tokens(context, numbers.reshape(tokens.shape))


def real_tokens(context: Context | None, mask: Array | None, like: Array) -> Array | None:
    """Return a mask of this rank's tokens that are not padding, (rows, tokens); None: all are real.

    Without a context it is ``mask``.  A context excludes a mask; its only padding fills up rows.
    """
    if context is None:
        return mask
    real = to_device_of(context.order < context.length, like)
    return np.broadcast_to(real, (len(like), len(real)))
