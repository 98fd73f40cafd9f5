"""Attention over tokens that are divided among ranks equals that of one device."""

import numpy as np
import pytest

from unsloth_cupy.errors import RangeError, ShapeError
from unsloth_cupy.parallel import (
    SingleCommunicator,
    ring_attention,
    ring_order,
    ulysses_attention,
)

from .ring import all_checks


def test_a_process_alone_has_it() -> None:
    all_checks(SingleCommunicator())


def test_causal_ranks_see_as_many_pairs() -> None:
    """Zigzag: every rank's queries see as many keys as another's, and all tokens are held once."""
    comm = SingleCommunicator()
    comm.size = 4
    orders = []
    for comm.rank in range(4):
        orders.append(ring_order(24, comm, causal=True))
    assert sorted(np.concatenate(orders)) == [*range(24)]
    assert len({int((order + 1).sum()) for order in orders}) == 1


def test_tokens_that_do_not_divide_are_refused() -> None:
    x = np.ones((1, 3, 1, 2), np.float32)
    with pytest.raises(ShapeError, match="3 tokens are not a multiple of 2"):
        ring_order(3, SingleCommunicator(), causal=True)
    with pytest.raises(ShapeError, match="not equal and even"):
        ring_attention(x, x, x, SingleCommunicator(), causal=True)


def test_heads_that_do_not_divide_are_refused() -> None:
    comm = SingleCommunicator()
    comm.size = 4
    x = np.ones((1, 4, 6, 2), np.float32)
    with pytest.raises(ShapeError, match=r"6 heads, 6 KV heads.*4 ranks; use 1, 2, 3, 6 ranks"):
        ulysses_attention(x, x, x, comm)
    y = x[:, :, :2]
    with pytest.raises(ShapeError, match=r"6 heads, 2 KV heads.*use 1, 2, 6 ranks"):
        ulysses_attention(x, y, y, comm)


@pytest.mark.parametrize("offsets", [[0, 3], [1, 4], [0, 3, 2, 4], [[0, 4]], [0.0, 4.0]])
def test_offsets_that_do_not_rise_to_the_end_are_refused(offsets: list[int]) -> None:
    x = np.ones((1, 4, 2, 2), np.float32)
    with pytest.raises(RangeError, match="do not rise from 0 to 4"):
        ring_attention(x, x, x, SingleCommunicator(), offsets=np.array(offsets))
    two = np.ones((2, 4, 2, 2), np.float32)
    with pytest.raises(ShapeError, match="pass all texts in one row"):
        ulysses_attention(two, two, two, SingleCommunicator(), offsets=np.array([0, 4]))
