"""Products of an output head, one chunk of rows at a time, so that the full logits never exist.

logits = x weight^T        dx = dlogits weight        dweight = dlogits^T x, summed in float32
"""

from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

import numpy as np

from ...core.arrays import contiguous, empty, rounded, zeroed
from ...core.dtypes import FLOAT32, Array
from ...core.stand_in import representative_steps
from ...errors import ConfigError
from ..common.checks import requested_gradients
from ..common.gemm import gemm
from ..linear.changed_matrix import gradient_shape, weight_gradient
from ..linear.linear import flat

# To add a chunk to dweight moves 8 bytes per element of dweight, for 2 operations per row.  With 6
# bytes per logit, 512 MiB are 697 rows of Llama 3's vocabulary of 128,256, so the float32 sums of
# dweight would move 12 times for 8,192 rows; with 2,048 rows they move 4 times.  A frozen head has
# no such sums, and its memory matters more: most heads of LoRA runs are frozen.
CHUNK_BYTES, TRAINED_ROWS = 512 * 2**20, 2048


def chunk_rows(
    rows: int, vocab: int, dtype: Any, max_bytes: int | None = None, *, trained: bool = False
) -> int:
    """Return the rows of a chunk, at least one.

    They fit into ``max_bytes``, by default 512 MiB; ``trained``, a pass that computes dweight, has
    at least 2,048 rows by default.
    """
    most = CHUNK_BYTES if max_bytes is None else max_bytes
    fitting = most // max(1, _row_bytes(vocab, np.dtype(dtype), kernels=True))
    least = TRAINED_ROWS if trained and max_bytes is None else 1
    return max(1, min(rows, max(fitting, least)))


def check_max_bytes(call: str, max_bytes: int | None) -> None:
    """Raise ConfigError unless max_bytes is None or positive."""
    if max_bytes is not None and max_bytes <= 0:
        raise ConfigError(f"{call}(max_bytes={max_bytes}): it must be positive")


def operations(a: dict[str, Any]) -> int:
    """Return the operations of the logits, and of dx and dweight where a call returns them."""
    products = 1 + sum(a.get(name) is not None for name in ("dx", "dweight"))
    return int(2 * a["x"].size * a["weight"].shape[0] * products)


def head_bytes(
    rows: int,
    hidden: int,
    vocab: int,
    dtype: Any,
    *,
    max_bytes: int | None = None,
    frozen: bool = False,
    kernels: bool = True,
) -> int:
    """Return the peak bytes of forward and backward, without arguments and results.

    They consist of a chunk of logits with its gradient and, unless the head is frozen, of the
    float32 sums of dweight; for float32 weights these sums are the result itself.
    ``kernels=False`` is for NumPy, which always writes the gradient over the logits.
    """
    kind = np.dtype(dtype)
    count = chunk_rows(rows, vocab, kind, max_bytes, trained=not frozen)
    chunk = count * _row_bytes(vocab, kind, kernels)
    sums = 0 if frozen or kind.itemsize >= FLOAT32.itemsize else FLOAT32.itemsize * vocab * hidden
    return chunk + sums


def _row_bytes(vocab: int, dtype: np.dtype[Any], kernels: bool) -> int:
    """Return the bytes of a row of logits and, if it has its own buffer, of its gradient."""
    narrow = kernels and dtype.itemsize < FLOAT32.itemsize  # a buffer of 16 bits for the gradient
    return vocab * (np.promote_types(dtype, FLOAT32).itemsize + narrow * dtype.itemsize)


def chunks(
    x: Array, weight: Array, max_bytes: int | None, *, trained: bool = False
) -> Iterator[tuple[slice, Array]]:
    """Yield slices of the rows of x and their logits, at least float32, in one reused buffer."""
    rows, vocab = flat(x), len(weight)
    step = chunk_rows(len(rows), vocab, x.dtype, max_bytes, trained=trained)
    buffer = empty((step, vocab), np.promote_types(x.dtype, FLOAT32), like=x)
    for start in representative_steps(x, range(0, len(rows), step)):
        part = slice(start, min(start + step, len(rows)))
        yield part, gemm(rows[part], weight.T, out=buffer[: part.stop - start])


def gradients(
    x: Array,
    weight: Array,
    max_bytes: int | None,
    write: Callable[[slice, Array, Array], None],
    *,
    own_buffer: bool,
    wanted: Set[str] | None,
) -> tuple[Array | None, Array | None]:
    """Return dx and dweight; None for a gradient that is not wanted.

    ``write(part, logits, out)`` writes the gradient of a chunk of logits to out: the logits
    themselves or, with ``own_buffer``, a buffer in the dtype of x, as products on a GPU require.
    """
    rows, dx, dweight = flat(x), None, None
    needed = requested_gradients("the output head", wanted, x=x, weight=weight)
    if "x" in needed:
        dx = empty(rows.shape, x.dtype, like=x)
    if "weight" in needed:
        dweight = empty(gradient_shape(weight), np.promote_types(x.dtype, FLOAT32), like=x)
        if not len(rows):
            dweight[...] = 0
    _add_chunks(x, weight, max_bytes, write, own_buffer, dx, dweight)
    return (
        None if dx is None else dx.reshape(x.shape),
        None if dweight is None else rounded(dweight, weight.dtype),  # the chunk is freed by now
    )


def _add_chunks(
    x: Array,
    weight: Array,
    max_bytes: int | None,
    write: Callable[[slice, Array, Array], None],
    own_buffer: bool,
    dx: Array | None,
    dweight: Array | None,
) -> None:
    """Write dx, and add to dweight, chunk by chunk; either may be None."""
    rows, vocab, buffer, trained = flat(x), len(weight), None, dweight is not None
    if own_buffer:
        count = chunk_rows(len(rows), vocab, x.dtype, max_bytes, trained=trained)
        buffer = empty((count, vocab), x.dtype, like=x)
    for part, logits in chunks(x, weight, max_bytes, trained=trained):
        dlogits = logits if buffer is None else buffer[: len(logits)]
        write(part, logits, dlogits)
        if not isinstance(dlogits, np.ndarray):  # a product on a GPU has operands of one dtype
            dlogits = dlogits.astype(weight.dtype, copy=False)
        if dx is not None:
            gemm(dlogits, weight, out=dx[part])
        if dweight is not None:
            # the first chunk writes, the others add
            weight_gradient(dlogits, rows[part], weight, dweight, part.start > 0)


# ---- losses of rows -----------------------------------------------------------------------------
class Rows:
    """The rows that a head computes: on a CPU the rows where a mask is True, on a GPU all rows.

    The host does not read a mask of a GPU.  Hidden rows are then set to zeros, before and after;
    with ``writes_zeros``, what computes the rows writes zeros for hidden ones itself.
    """

    def __init__(self, mask: Array | None, *, kernels: bool, writes_zeros: bool = False) -> None:
        self.mask = None if mask is None else contiguous(mask).reshape(-1)
        self.writes_zeros, self.numbers = writes_zeros, None
        if isinstance(self.mask, np.ndarray) and not kernels:
            self.numbers = np.flatnonzero(self.mask)

    def of(self, array: Array) -> Array:
        """Return the rows of the head's input; hidden rows are zeros: NaN would reach dweight."""
        rows = flat(array)
        return zeroed(rows, self.mask) if self._hides else self._chosen(rows)

    def beside(self, array: Array) -> Array:
        """Return the elements of an array (*rows) that belong to the rows."""
        rows = contiguous(array).reshape(-1)
        return (
            zeroed(rows, self.mask) if self._hides and not self.writes_zeros else self._chosen(rows)
        )

    @property
    def _hides(self) -> bool:
        """Whether hidden rows are computed, and must become zeros."""
        return self.mask is not None and self.numbers is None

    def _chosen(self, rows: Array) -> Array:
        return rows if self.numbers is None else rows[self.numbers]

    def back(self, rows: Array) -> Array:
        """Return an array for all rows, with zeros for hidden rows."""
        if self.mask is None or self.numbers is None:
            return zeroed(rows, self.mask) if self._hides and not self.writes_zeros else rows
        whole = np.zeros_like(rows, shape=(self.mask.size, *rows.shape[1:]))
        whole[self.numbers] = rows
        return whole


def check_head(call: str, temperature: float, scale: float, softcap: float | None) -> None:
    """Raise ConfigError for an option of a head that is out of its range."""
    if not temperature > 0:
        raise ConfigError(f"{call}(temperature={temperature}): temperature must be above 0")
    if scale == 0:
        raise ConfigError(f"{call}(scale=0): all tokens would be as likely; pass another scale")
    if softcap is not None and not softcap > 0:
        raise ConfigError(f"{call}(softcap={softcap}): softcap must be positive; None for no cap")


def head_gradients(
    x: Array,
    weight: Array,
    bias: Array | None,
    rows: Rows,
    arrays: Sequence[Array | None],
    max_bytes: int | None,
    wanted: Set[str] | None,
    write: Callable[[slice, Array, Any, Array], None],
    *,
    own_buffer: bool,
) -> tuple[Array | None, Array | None, Array | None]:
    """Return dx, dweight and dbias; None for a gradient that is not wanted.

    ``write(part, logits, arrays, out)`` writes the gradient of a chunk of logits, from the elements
    of ``arrays`` that belong to its rows.
    """
    each = [None if a is None else rows.beside(a) for a in arrays]
    sums = None
    if bias is not None and (wanted is None or "bias" in wanted):
        sums = np.zeros_like(x, np.promote_types(x.dtype, FLOAT32), shape=(len(weight),))

    def write_part(part: slice, logits: Array, out: Array) -> None:
        write(part, logits, [None if a is None else a[part] for a in each], out)
        if sums is not None:
            np.add(sums, out.sum(axis=0, dtype=sums.dtype), out=sums)

    dx, dweight = gradients(
        rows.of(x), weight, max_bytes, write_part, own_buffer=own_buffer, wanted=wanted
    )
    dx = None if dx is None else rows.back(dx).reshape(x.shape)
    return dx, dweight, None if sums is None or bias is None else sums.astype(bias.dtype)
