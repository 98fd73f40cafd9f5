"""The texts of a call: packed end to end in one row, or the rows of a batch."""

from typing import Any

import numpy as np

from ...core.dtypes import Array
from ...core.target import limits
from ...errors import ShapeError
from ..attention.sequences import check_offsets


def ends(sizes: dict[str, Any]) -> dict[str, Any]:
    """Return the size of the axis ``ends``, the number of final states: one for each text."""
    return {"ends": sizes.get("texts", sizes["batch"])}


def count_of(batch: int, offsets: Array | None) -> int:
    """Return the number of texts."""
    return batch if offsets is None else offsets.shape[0] - 1


def check_texts(call: str, lead: Any, initial: Any, offsets: Any) -> None:
    """Raise ShapeError unless offsets have batch 1, and initial has a state for each text."""
    batch = lead.shape[0]
    if offsets is not None and batch != 1:
        cure = "with offsets it must be 1: pass reshape(1, -1, ...) of all arrays"
        raise ShapeError(f"{call}: batch={batch}; {cure}", expected=1, actual=batch)
    texts = count_of(batch, offsets)
    if offsets is not None and texts < 1 and lead.size:
        problem = "offsets has no element" if texts < 0 else "offsets has no text"
        problem = f"{call}: {problem}; pass the first token of each text, then the number of tokens"
        raise ShapeError(problem, expected="2 elements or more", actual=tuple(offsets.shape))
    if initial is not None and initial.shape[0] != max(texts, 0):
        problem = f"initial has {initial.shape[0]} states; pass {texts}, one for each text"
        raise ShapeError(f"{call}: {problem}", expected=texts, actual=initial.shape[0])


def offsets_of(call: str, lead: Array, offsets: Array | None) -> Any:
    """Return the index of the first token of each text, then the number of tokens.

    Offsets on the host are checked; the host does not read offsets of a device.
    """
    batch, tokens = lead.shape[:2]
    if offsets is None:
        return np.arange(batch + 1, like=lead) * tokens
    if type(offsets) is np.ndarray and offsets.size:
        check_offsets(call, "offsets", offsets, tokens)
    return offsets


def tile_of(tokens: int, blocks: int, like: Any) -> int:
    """Return the tokens of a block: 64, or fewer so that each SM has up to 8 blocks, half at once.

    One block more than that would be a third wave, in which most SMs are idle.
    """
    target = 8 * limits(like).processors  # blocks
    return max(1, min(64, -(-tokens * blocks // target)))
