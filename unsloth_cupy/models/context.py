"""The tokens of a text that are divided among ranks: which are this one's, and what they attend to.

Rows are filled up until they divide; what fills them up is the last token again, which predicts
nothing, and is seen by nothing of a text.

    ring       tokens are dealt in the zigzag order of ``ring_order``; keys and values go around
    ulysses    each rank has tokens side by side, and attends with some heads to all of them
"""

from typing import Any, NamedTuple, Self

import numpy as np

from ..core.dtypes import Array
from ..errors import ConfigError
from ..parallel.communicator import Communicator, part
from ..parallel.ring import ring_attention, ring_order
from ..parallel.ulysses import ulysses_attention
from ..placement import placed, to_numpy
from .inputs import Places

KINDS: dict[str, Any] = {"ring": ring_attention, "ulysses": ulysses_attention}


class Context(NamedTuple):
    """The tokens of this rank, of all rows."""

    comm: Communicator
    order: Array  # where each of them stands in its row; beyond the last token where it fills up
    length: int  # tokens of a row
    offsets: Array | None  # where texts start that share the row, on the host
    kind: str

    @classmethod
    def of(
        cls, comm: Communicator | None, tokens: Any, mask: Any, offsets: Any, kind: str = "ring"
    ) -> Self | None:
        """Return which tokens are this rank's; None where ranks do not divide them.

        Raises
        ------
        ConfigError
            There is a mask, or a kind is not known.
        """
        if comm is None or comm.size == 1:
            return None
        if mask is not None:
            cure = "lay texts end to end with offsets, or give padding labels of -100"
            raise ConfigError(f"Transformer: a mask is not divided among ranks; {cure}")
        length = int(tokens.shape[1] if offsets is None else tokens.size)
        if kind not in KINDS:
            problem = f"Transformer: context_attention {kind!r} is not known"
            raise ConfigError(f"{problem}; choose from {', '.join(KINDS)}")
        step = comm.size * (2 if kind == "ring" else 1)
        whole = -(-length // step) * step
        texts = None if offsets is None else to_numpy(offsets)
        if texts is not None and whole > length:
            texts = np.append(texts, whole)
        side_by_side = np.arange(whole)[part(whole, comm)]
        order = ring_order(whole, comm, causal=True) if kind == "ring" else side_by_side
        return cls(comm, order, length, texts, kind)

    def own(self, x: Any) -> Any:
        """Return this rank's columns of (rows, tokens); the last one again to fill up."""
        return x[:, placed(self.order.clip(max=max(self.length - 1, 0)), x)]

    def places(self, here: Places) -> Places:
        """Return where the tokens of this rank stand."""
        every = here.positions
        if every is None:
            like = next(iter(here.tables.values()))[0]
            every = placed(np.arange(self.length)[None], like)
        return here._replace(positions=self.own(every), offsets=None)

    def attend(self, q: Any, k: Any, v: Any, **options: Any) -> Any:
        """Return the attention of this rank's queries over the keys of all ranks."""
        return KINDS[self.kind](q, k, v, self.comm, offsets=self.offsets, **options)


def own_tokens(context: Context | None, tokens: Array) -> Array:
    """Return this rank's tokens of (rows, tokens), or what they predict."""
    return tokens if context is None else context.own(tokens)
