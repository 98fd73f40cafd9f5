"""Random bits that depend only on a seed and a position: Philox4x32-10.

A counter of four 32-bit words and a key of two words give four random words.  So each position has
its own bits, whatever the tiles of a kernel are and in whatever order it computes them.

Salmon, Moraes, Dror and Shaw, Parallel Random Numbers: As Easy as 1, 2, 3, 2011.
"""

import math
from typing import Any

import numpy as np

from ...core.call import is_integer
from ...core.dtypes import Array
from ...errors import ConfigError

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)  # this and the next two from the paper
WEYL = (0x9E3779B9, 0xBB67AE85)  # added to the key in each round
ROUNDS = 10
WORD = 0xFFFFFFFF


def words(seed: int, counter: tuple[Any, Any, Any, Any]) -> tuple[Array, Array, Array, Array]:
    """Return four random 32-bit words, as uint64, for each counter.

    The words of a counter are uint64 arrays below 2**32 that broadcast against each other; the key
    is the low and the high half of the seed.
    """
    a, b, c, d = counter
    key = [seed & WORD, seed >> 32 & WORD]
    for _ in range(ROUNDS):
        first, second = a * MULTIPLIERS[0], c * MULTIPLIERS[1]
        a, b = (second >> 32) ^ b ^ key[0], second & WORD
        c, d = (first >> 32) ^ d ^ key[1], first & WORD
        key = [(k + step) & WORD for k, step in zip(key, WEYL, strict=True)]
    return a, b, c, d


def keep_mask(
    seed: int, dropout: float, rows: tuple[Any, Any, Any], start: int, stop: int
) -> Array:
    """Return True where dropout keeps an element, for the columns start .. stop of each row.

    ``rows`` are three integer arrays that broadcast against each other and identify a row, for
    instance (batch, head, query).  Column j uses word j % 4 of the counter (*rows, j // 4).  An
    element is kept with probability 1 - dropout.
    """
    return row_words(seed, rows, start, stop) >= round(dropout * 2**32)


def row_words(seed: int, rows: tuple[Any, Any, Any], start: int, stop: int) -> Array:
    """Return the random words of the columns start .. stop of each row: see ``keep_mask``."""
    a, b, c = (index.astype(np.uint64)[..., None] for index in rows)
    fours = np.arange(start // 4, -(-stop // 4), dtype=np.uint64, like=a)
    drawn = np.stack(np.broadcast_arrays(*words(seed, (a, b, c, fours))), axis=-1)
    drawn = drawn.reshape(*drawn.shape[:-2], 4 * len(fours))  # (*rows, 4 * fours)
    return drawn[..., start % 4 :][..., : stop - start]  # (*rows, stop - start)


def check(call: str, dropout: float, seed: int | None) -> None:
    """Raise ConfigError unless dropout is a probability below 1 and, if not 0, has a seed."""
    if not 0 <= dropout < 1:
        raise ConfigError(f"{call}: dropout={dropout} must be at least 0 and below 1")
    if dropout and not is_integer(seed, -math.inf):
        raise ConfigError(f"{call}: dropout={dropout} needs an integer; seed={seed}, pass seed=0")
    if dropout and not 0 <= int(seed or 0) < 2**64:
        raise ConfigError(f"{call}: seed={seed} must be in 0 .. 2**64 - 1")
