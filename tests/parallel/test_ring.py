"""Attention over tokens that are divided among ranks equals that of one device."""

import numpy as np
import pytest

from unsloth_cupy.errors import ShapeError
from unsloth_cupy.parallel import SingleCommunicator, ring_attention, ring_order

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
    with pytest.raises(ShapeError, match="not alike and even"):
        ring_attention(x, x, x, SingleCommunicator(), causal=True)
