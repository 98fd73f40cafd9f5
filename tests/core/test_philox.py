"""Philox4x32-10 against the known answers of its authors' Random123 library."""

import numpy as np
import pytest

from unsloth_cupy.ops.common import philox

ONES = 0xFFFFFFFF
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)


@pytest.mark.parametrize(
    ("counter", "seed", "answer"),
    [
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (PI, 0x299F31D0A4093822, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ],
)
def test_known_answers(counter: tuple[int, ...], seed: int, answer: tuple[int, ...]) -> None:
    a, b, c, d = (np.array([word], np.uint64) for word in counter)
    assert tuple(int(word[0]) for word in philox.words(seed, (a, b, c, d))) == answer


@pytest.mark.parametrize(("start", "stop"), [(0, 37), (5, 6), (3, 9), (8, 8), (36, 37)])
def test_a_part_is_a_part_of_the_whole(start: int, stop: int) -> None:
    """Columns start .. stop hold what they hold in any longer run."""
    rows = (np.arange(2)[:, None], np.arange(3), np.array(4))
    whole = philox.keep_mask(9, 0.5, rows, 0, 37)
    assert whole.shape == (2, 3, 37)
    assert 0 < whole.mean() < 1
    assert (philox.keep_mask(9, 0.5, rows, start, stop) == whole[..., start:stop]).all()


def test_share() -> None:
    """A million draws keep 1 - dropout of them, within five standard errors."""
    rows = (np.array(0), np.array(0), np.arange(1000))
    kept = philox.keep_mask(1, 0.1, rows, 0, 1000)
    assert abs(kept.mean() - 0.9) < 5 * np.sqrt(0.09 / kept.size)
