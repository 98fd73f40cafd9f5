"""What the tests of recurrences check of texts: packed, alone, in pieces, on any schedule."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..harness.parity import Arrays, emulator

# Return the results of a call and its backward: those of tokens, of states, then of parameters.
BothWays = Callable[[Arrays, Any], list[Any]]


class Unread(np.ndarray):
    """An array that plays one of a device, which the host must not read."""


def offsets_of(lengths: Sequence[int]) -> np.ndarray:
    return np.cumsum([0, *lengths])


def assert_bits_of_each_alone(
    both_ways: BothWays, arrays: Arrays, lengths: Sequence[int], of_tokens: int
) -> None:
    """Raise unless packed texts have the bits of each text alone, in tokens and in states.

    ``of_tokens`` is the number of results of tokens; two results of states follow them.
    """
    offsets = offsets_of(lengths)
    packed = both_ways(arrays, offsets)
    for text, (start, stop) in enumerate(itertools.pairwise(offsets)):
        own = {n: a[:, start:stop] if a.ndim > 2 else a for n, a in arrays.items()}
        own |= {n: arrays[n][text : text + 1] for n in ("initial", "dfinal")}
        for at, alone in enumerate(both_ways(own, None)[: of_tokens + 2]):
            part = slice(start, stop), slice(text, text + 1)
            same = packed[at][:, part[0]] if at < of_tokens else packed[at][part[1]]
            assert alone.tobytes() == same.tobytes()


def assert_any_schedule(both_ways: BothWays, arrays: Arrays, lengths: Sequence[int]) -> None:
    """Raise unless any order of threads and blocks gives equal bits."""
    with emulator():
        expected = both_ways(arrays, offsets_of(lengths))
    with emulator(seed=3):
        actual = both_ways(arrays, offsets_of(lengths))
    assert [a.tobytes() for a in actual] == [a.tobytes() for a in expected]


def assert_texts_of_a_device_are_not_read(
    both_ways: BothWays, arrays: Arrays, lengths: Sequence[int]
) -> None:
    """The definition pads them then, and their number of chunks is an upper bound."""
    offsets = offsets_of(lengths)
    expected, actual = (both_ways(arrays, o) for o in (offsets, offsets.view(Unread)))
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)


def assert_states_go_on(op: Any, inputs: Arrays, lengths: Sequence[int]) -> None:
    """Raise unless a text in pieces has the results of the whole text."""
    whole, last = op(**inputs)
    state, parts = None, []
    for start, stop in itertools.pairwise(offsets_of(lengths)):
        own = {n: a[:, start:stop] if a.ndim > 2 else a for n, a in inputs.items()}
        part, state = op(**own, initial=state)
        parts.append(part)
    np.testing.assert_allclose(np.concatenate(parts, axis=1), whole, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(state, last, rtol=1e-9, atol=1e-12)  # type: ignore[arg-type]
