"""Attention over latent rows: the row of a token is the key of all heads, its start the value.

out = softmax(scale * q @ rows.T) @ rows[:, : rank]

Latent attention (MLA) makes keys and values of a head by two matrices, k = c B_k and v = c B_v,
from one short vector c of a token.  Both products can move to the other side of attention:

q (c B_k)^T = (q B_k^T) c^T          softmax(score) (c B_v) = (softmax(score) c) B_v

DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language Model, 2024.
"""

import math
from typing import Any

import numpy as np

from ...core.call import is_integer
from ...core.dtypes import Array
from ...core.op import op
from ...errors import ConfigError, RangeError, ShapeError
from ._latent import launch_latent
from ._options import Options
from ._scores import Scores
from .attention import attend

LARGEST = float(np.finfo(np.float32).max)  # of scale, which is a float32 in kernels


def latent_attention(
    q: Array,
    latents: Array,
    lengths: Array,
    page_table: Array | None = None,
    *,
    rank: int,
    scale: float,
    causal: bool = True,
    mask: Array | None = None,
) -> Array:
    """Return ``softmax(scale * q @ rows.T) @ rows[:, :rank]`` for the latent rows of each sequence.

    All heads read the same row of a token.  With causal the last query has the position of the last
    row.  A query that sees no row gives zeros.

    Parameters
    ----------
    q : (batch, queries, heads, dim) float
        Queries, already multiplied by the matrix that makes keys, and their rotated part.
    latents : (batch, keys, dim) float, or (pages, page, dim) with page_table
        A row for each token: the vector of keys and values, then the rotated part of the key.
    lengths : (batch,) int
        The number of rows of each sequence; later rows are ignored, whatever they hold.
    page_table : (batch, max_pages) int, optional
        The pages of each sequence, in order; entries after its last page are not read.
    rank : int
        How many of the first numbers of a row are its value: 1 .. dim.
    scale : float
        Factor of the scores, above 0.  It has no default: a model uses 1 / sqrt of its head dim
        before keys are projected to latents, not of the length of a row.
    causal : bool
        A query sees no row after its own position.
    mask : bool, up to 4 axes that broadcast to (batch, heads, queries, keys), optional
        True where a query may see a row; with page_table, ``keys = max_pages * page``.

    Returns
    -------
    out : (batch, queries, heads, rank) float
        For each query and head, the weighted sum of the values.

    Raises
    ------
    ShapeError, DTypeError
        The arrays do not fit each other; the message shows the whole call.
    ConfigError
        rank or scale is invalid.
    RangeError
        A length exceeds its rows, or a page number is outside 0 .. pages - 1.

    Examples
    --------
    >>> import numpy as np
    >>> from unsloth_cupy import attention, latent_attention, latent_attention_forward
    >>> rng = np.random.default_rng(0)
    >>> q = rng.standard_normal((1, 2, 8, 24), np.float32)  # batch, tokens, heads, 16 + 8 numbers
    >>> rows = rng.standard_normal((1, 10, 24), np.float32)
    >>> lengths = np.array([10])
    >>> out = latent_attention(q, rows, lengths, rank=16, scale=0.2)
    >>> k = rows[:, :, None]  # one head of keys
    >>> expected = attention(q, k, k[..., :16], causal=True, scale=0.2)
    >>> np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    >>> pages, table = rows.reshape(5, 2, 24), np.arange(5)[None]
    >>> out, lse = latent_attention_forward(q, pages, lengths, table, rank=16, scale=0.2)
    """
    options: Any = {"rank": rank, "scale": scale, "causal": causal, "mask": mask}
    return latent_attention_forward(q, latents, lengths, page_table, **options)[0]


def _operations(arrays: Any) -> int:
    """Return the operations of the two products, as if every query saw every row."""
    q, latents, table = (arrays.get(name) for name in ("q", "latents", "page_table"))
    keys = latents.shape[1] * (1 if table is None else table.shape[1])
    rows: int = q.size // max(1, q.shape[3])
    return 2 * rows * keys * (q.shape[3] + arrays["out"].shape[3])


@op(
    "q(batch, queries, heads, dim), latents(pages, page, dim), lengths(batch): int,"
    " page_table?(batch, max_pages): int, mask?(batch|1, heads|1, queries|1, keys|1): bool"
    " -> out(batch, queries, heads, rank), lse(batch, heads, queries): stat",
    widen=False,  # a cache is large: only the rows that exist are widened
    no_gradient="it reads a cache, which exists only in inference",
    sizes=lambda shape, rank, **_: {"rank": rank},
    operations=_operations,
)
def latent_attention_forward(
    q: Array,
    latents: Array,
    lengths: Array,
    page_table: Array | None = None,
    *,
    mask: Array | None = None,
    rank: int,
    scale: float,
    causal: bool = True,
) -> tuple[Array, Array]:
    """Return the out of ``latent_attention``, and ``lse = log(sum(exp(score)))`` of each row."""
    wide = np.promote_types(q.dtype, np.float32) if q.dtype.kind == "f" else np.dtype(np.float32)
    page = latents.shape[1]
    if type(q) is np.ndarray:  # the host does not wait for lengths of a device
        _check_range(page_table, lengths, latents.shape)
        most = int(lengths.max(initial=0))
        if page_table is not None:
            page_table = page_table[:, : math.ceil(most / max(page, 1))]
        else:
            latents = latents[:, :most]
    rows = latents
    if page_table is not None:
        count = page_table.shape[1]
        used = np.arange(count, like=q) * page < lengths[:, None]
        rows = latents[np.where(used, page_table, 0)] if len(latents) else latents[:0]
        rows = rows.reshape(len(q), count * page, latents.shape[2])  # (batch, keys, dim)
    keys = rows.shape[1]
    k = rows.astype(wide)[:, :, None]  # (batch, keys, 1, dim)
    if mask is not None and mask.ndim and mask.shape[-1] != 1:
        mask = mask[..., :keys]
    options = Options(mask=mask, key_lengths=lengths, causal=causal, scale=scale)
    return attend(Scores(q.astype(wide), k, k[..., :rank], options))


@latent_attention_forward.kernel
def _launch(
    q: Array,
    latents: Array,
    lengths: Array,
    page_table: Array | None,
    mask: Array | None,
    rank: int,
    scale: float,
    causal: bool,
) -> Any:
    options: Any = {"rank": rank, "scale": scale, "causal": causal}
    return launch_latent(q, latents, lengths, page_table, mask, **options)


@latent_attention_forward.require
def _check(
    call: str,
    q: Array,
    latents: Array,
    lengths: Array,
    page_table: Array | None,
    mask: Array | None,
    rank: int,
    scale: float,
) -> None:
    """Raise ConfigError for invalid options, ShapeError if arrays have other sequences or keys."""
    dim, (pages, page) = q.shape[3], latents.shape[:2]
    if not is_integer(rank, 1) or rank > dim:
        cure = f"pass how many of a row's {dim} numbers are its value"
        raise ConfigError(f"{call}: rank={rank!r}; {cure}")
    if not 0 < scale <= LARGEST:
        raise ConfigError(f"{call}: scale={scale!r}; pass a number above 0 that float32 holds")
    if page_table is None and pages != q.shape[0]:
        problem = f"{call}: latents has {pages} sequences for {q.shape[0]} of q"
        cure = "pass as many, or a page_table"
        raise ShapeError(f"{problem}; {cure}", expected=q.shape[0], actual=pages)
    keys = page if page_table is None else page_table.shape[1] * page
    if mask is not None and mask.ndim and mask.shape[-1] not in {1, keys}:
        problem = f"{call}: mask of shape {mask.shape} has {mask.shape[-1]} for keys"
        cure = f"it must be {keys}, for which there is room, or 1"
        raise ShapeError(f"{problem}; {cure}", expected=(1, keys), actual=mask.shape[-1])


def _check_range(page_table: Array | None, lengths: Array, shape: tuple[int, ...]) -> None:
    """Raise RangeError if lengths, or page numbers within them, are outside the rows."""
    pages, page = shape[:2]
    room = page if page_table is None else page_table.shape[1] * page
    if lengths.size and not 0 <= lengths.min() <= lengths.max() <= room:
        actual = f"lengths holds {lengths.min()} .. {lengths.max()}"
        cure = f"it must be in 0 .. {room}, the rows of a sequence"
        raise RangeError(f"latent_attention: {actual}; {cure}")
    if page_table is not None:
        used = np.arange(page_table.shape[1]) * page < lengths[:, None]
        outside = used & ((page_table < 0) | (page_table >= pages))
        if outside.any():
            problem = f"page_table holds {page_table[outside][0]}"
            cure = f"it must be in 0 .. {pages - 1}, the pages"
            raise RangeError(f"latent_attention: {problem}; {cure}")
