"""Layers divided among ranks equal those of one device."""

import numpy as np
import pytest

from unsloth_cupy.errors import ConfigError, RangeError, ShapeError
from unsloth_cupy.parallel import (
    SingleCommunicator,
    vocab_parallel_embedding,
    vocab_parallel_linear_cross_entropy,
)

from .layers import all_checks

COMM = SingleCommunicator()
TABLE = np.ones((4, 2), np.float32)


def test_a_process_alone_has_all_layers() -> None:
    all_checks(COMM)


def test_what_does_not_fit_is_refused() -> None:
    tokens = np.array([0, 3])
    with pytest.raises(ShapeError, match="has 4 of vocab=5, not 5"):
        vocab_parallel_embedding(tokens, TABLE, 5, comm=COMM)
    with pytest.raises(RangeError, match="holds 4"):
        vocab_parallel_embedding(np.array([4]), TABLE, 4, comm=COMM)
    with pytest.raises(RangeError, match="labels"):
        vocab_parallel_linear_cross_entropy(TABLE[:2], TABLE, tokens + 1, 4, comm=COMM)
    with pytest.raises(ConfigError, match=r"smoothing=1.5\): pass a number in"):
        vocab_parallel_linear_cross_entropy(TABLE, TABLE, tokens, 4, comm=COMM, smoothing=1.5)
    with pytest.raises(ShapeError, match="are the same axis"):
        COMM.all_to_all(TABLE, 1, -1)
    with pytest.raises(ConfigError, match="is not enough"):
        vocab_parallel_embedding(tokens, TABLE[:0], 0, comm=COMM)
