"""Computes a function in chunks of rows, so that its inner arrays have the size of a chunk.

    y = in_chunks(mlp, [x], weights, 4096)

Each chunk of rows passes through the whole function.  Backward calls the function again for each
chunk, differentiates that, and adds up the gradients of the parameters.
(Arctic Long Sequence Training, 2025, which tiles MLPs over tokens.)
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..core.arrays import empty, rounded
from ..core.dtypes import FLOAT32
from ..core.replay import is_fixed
from ..core.stand_in import representative_steps
from ..errors import GradientError
from ..ops.elements.cast import accumulate_
from .checkpoint import FirstCall, SecondCall
from .tape import Gradients, Tape, add_up
from .variable import Var

CHUNK_BYTES = 128 * 2**20  # of one inner array: products of thousands of rows for a 16-bit 8B model
CHUNKS = 8  # fewest chunks if they are requested: inner arrays are then small beside whole ones
CHUNK_ROWS = 32  # fewest rows of a chunk: with fewer, the time of a product is reading the weight
Function = Callable[[Mapping[str, Any], slice, Sequence[Any]], Any]  # (parameters, part, rows)


def chunk_of(
    requested: bool | None, rows: Any, parameters: Collection[Any], width: int
) -> int | None:
    """Return the number of rows in a chunk of a function; None: all rows at once.

    Parameters
    ----------
    requested : bool, optional
        True: at least CHUNKS chunks; False: none.  None: where rows exceed a chunk, and there is no
        tape, or a checkpoint, which calls the function again anyway; but not where the order of
        sums in backward is fixed, as the sums of a chunk depend on the number of rows before it.
    rows : (*rows, n) array or Var
    parameters : collection of array or Var
        As in ``in_chunks``.
    width : int
        Values per row of an inner array.  An inner array of a chunk has at most CHUNK_BYTES, or as
        many bytes as the float32 sums of the gradients of ``parameters`` if those are more.
    """
    count, of_row = math.prod(rows.shape[:-1]), max(1, width * rows.dtype.itemsize)
    if requested:
        least = max(CHUNK_ROWS, -(-count // CHUNKS))
        size = max(CHUNK_ROWS, min(CHUNK_BYTES // of_row, least))
        return size if count > size else None
    tapes = {type(each.tape) for each in (rows, *parameters) if type(each) is Var}
    if requested is False or Tape in tapes or (tapes and is_fixed()):
        return None
    sums = sum(each.value.size for each in parameters if type(each) is Var) * FLOAT32.itemsize
    size = max(CHUNK_ROWS, max(CHUNK_BYTES, sums) // of_row)
    return size if count > size else None


def in_chunks(
    function: Function,
    rows: Sequence[Any],
    parameters: Mapping[str, Any],
    size: int,
    *,
    unread: bool = False,
) -> Any:
    """Return ``function(parameters, part, rows)``, computed for one chunk of rows at a time.

    Parameters
    ----------
    function : callable
        Called with the parameters, the slice of a chunk, and the rows of the chunk: arrays of shape
        (1, size, ...).  It returns an array with the shape and dtype of the first of them, and its
        rows depend only on the same rows of the arguments.
    rows : sequence of (*rows, n) array or Var
        Arrays with the same leading axes.
    parameters : dict of str to array or Var
        What the function uses beside the rows.
    size : int
        Rows of a chunk; the last one may have fewer.
    unread : bool
        Whether nothing reads the values of the result within the same checkpoint.  The second call
        of the checkpoint then computes none: only the gradients are needed.

    Returns
    -------
    y : array or Var
        In the shape and dtype of the first of ``rows``.  Gradients of parameters are summed over
        chunks in float32 or wider.
    """
    operands: dict[Any, Any] = {**dict(enumerate(rows)), **parameters}
    variables = {name: each for name, each in operands.items() if type(each) is Var}
    values = {name: each.value if type(each) is Var else each for name, each in operands.items()}
    tape = next(iter(variables.values())).tape if variables else None
    if any(var.tape is not tape for var in variables.values()):
        raise GradientError("in_chunks: arguments are on two tapes; watch them on one")
    chunks = Chunks(function, size, len(rows), values, {}, {})
    if unread and type(tape) is SecondCall:
        first = values[0]
        one = empty((1,) * first.ndim, first.dtype, like=first)
        y = np.broadcast_to(one, first.shape)
    else:
        y = chunks.forward(variables.keys())
    if tape is None:
        return y
    result = Var(y, tape)
    inputs = {str(name): var.index for name, var in variables.items()}
    tape.note(chunks._replace(inputs=inputs, outputs={"y": result.index}))
    return result


class Chunks(NamedTuple):
    """A tape entry of a function that is computed in chunks of rows."""

    function: Function
    size: int
    arrays: int  # number of the arrays of rows, whose names are 0, 1, 2 and so on
    values: dict[Any, Any]
    inputs: dict[str, int]
    outputs: dict[str, int]

    def forward(self, watched: Any) -> Any:
        """Return the result for all rows; the values named ``watched`` are on a tape."""
        first = self.values[0]
        y = empty(first.shape, first.dtype, like=first)
        to = _flat(y)
        for part in self.parts():
            result = self.call(FirstCall(frozenset()), part, watched)[0]
            to[:, part] = result.value if type(result) is Var else result
            del result  # free it before the next chunk
        return y

    def parts(self) -> Iterator[slice]:
        """Yield the slice of each chunk."""
        first = self.values[0]
        count = math.prod(first.shape[:-1])
        for start in representative_steps(first, range(0, count, self.size)):
            yield slice(start, min(start + self.size, count))

    def call(self, tape: Tape, part: slice, watched: Any) -> tuple[Any, dict[Any, Var]]:
        """Return the result of a chunk on a tape, and the Vars of the ``watched`` values."""
        used = {
            name: _flat(value)[:, part] if name in range(self.arrays) else value
            for name, value in self.values.items()
        }
        variables = {name: tape.watch(used[name]) for name in watched}
        used |= variables
        rows = [used.pop(name) for name in range(self.arrays)]
        return self.function(used, part, rows), variables

    def add_back(self, take: dict[str, Any], inputs: dict[str, int], grads: Gradients) -> None:
        """Compute each chunk again, and add the gradients of rows and parameters to grads."""
        dy = _flat(take["y"])
        indices = {name: inputs[str(name)] for name in self.values if str(name) in inputs}
        sums = {}
        for name in indices:
            value, of_rows = self.values[name], name in range(self.arrays)
            dtype = value.dtype if of_rows else np.promote_types(value.dtype, FLOAT32)
            sums[name] = empty(value.shape, dtype, like=value)
            if not of_rows:
                sums[name][...] = 0
        for part in self.parts():
            tape = Tape()
            result, variables = self.call(tape, part, indices)
            inner = {result.index: dy[:, part]} if type(result) is Var else {}
            del result
            tape.walk_back(inner, {var.index for var in variables.values()})
            for name, var in variables.items():
                gradient = inner.pop(var.index, None)
                if name in range(self.arrays):
                    _flat(sums[name])[:, part] = 0 if gradient is None else gradient
                elif gradient is not None:
                    accumulate_(sums[name], gradient)
                del gradient
        for name, index in indices.items():
            gradient = rounded(sums.pop(name), self.values[name].dtype)
            grads[index] = add_up(grads.get(index), gradient)


def _flat(array: Any) -> Any:
    """Return an array of rows as (1, rows, n)."""
    return array.reshape(1, -1, array.shape[-1])
