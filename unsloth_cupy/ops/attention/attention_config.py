"""Where the choice of attention's tiles begins, for a kind of GPU.

    AttentionConfig.for_rtx_5080().resolve(0, dim=64)   what a block works on, on GPU 0
    with AttentionConfig(tile=64).use(): ...            what attention takes inside

A tile costs shared memory and registers, so the same numbers do not launch everywhere: ``resolve``
takes what comes nearest among the tiles of the table that do.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ...core.call import checked, is_integer
from ...core.dtypes import KERNEL_DTYPES, float_dtype
from ...core.gpu import limits_of
from ...core.op import OPS
from ...core.target import Limits, limits, target_of
from ...errors import ConfigError, DeviceError, DTypeError, KernelError
from . import _tiles
from ._options import ANY, CAUSAL
from ._tiles import Start, Tiles, resolve


@checked
@dataclass(frozen=True)
class AttentionConfig:
    """Queries and threads of a block of the forward kernel of attention: the most to begin with.

    Without one, attention takes the best tiles of its table for the GPU, the head dim and the
    options of a call.  This is for measuring others.

    Parameters
    ----------
    tile : int
        Queries of a block, 16 or more.
    block : int
        Threads of a block, 32 or more.
    head_dim : int
        Columns of a head, 1 or more: what ``resolve`` and ``shared_memory_bytes`` are asked for.
    warpgroups : bool
        On Hopper, what attention_forward_sm90.cu and attention_backward_sm90.cu take goes there,
        and tile and block are of the other calls.  No GPU has run these kernels yet: nothing goes
        there without being asked for.
    one_pass : bool or None
        With warpgroups, whether one launch makes dq, dk and dv where it can: head dims up to 128,
        and no mask, block mask, bias, ALiBi slopes or soft cap.  By default where a model says
        that it is the faster one.

    Raises
    ------
    ConfigError
        A number is too small, an option is not of its kind, or one_pass is said without warpgroups.
    """

    tile: int = 128
    block: int = 256
    head_dim: int = 64
    warpgroups: bool = False
    one_pass: bool | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name, least in (("tile", 16), ("block", 32), ("head_dim", 1)):
            value = getattr(self, name)
            if not is_integer(value, least):
                problem = f"AttentionConfig({name}={value!r})"
                raise ConfigError(f"{problem}: pass an integer, {least} or more")
        if self.one_pass is not None and not self.warpgroups:
            given = f"one_pass={self.one_pass}"
            problem = f"AttentionConfig({given}): kernels on warpgroups alone have it"
            raise ConfigError(f"{problem}; pass AttentionConfig(warpgroups=True, {given})")

    @classmethod
    def for_rtx_5080(cls) -> "AttentionConfig":
        """Return where to begin on an RTX 5080: 99 KB of shared memory a block."""
        return cls(tile=256, block=256)

    @classmethod
    def for_rtx_3090_ti(cls) -> "AttentionConfig":
        """Return where to begin on an RTX 3090 Ti: 99 KB of shared memory a block."""
        return cls(tile=128, block=256)

    @classmethod
    def for_datacenter(cls) -> "AttentionConfig":
        """Return where to begin on an A100 or an H100: 163 or 227 KB of shared memory a block."""
        return cls(tile=256, block=256)

    rtx_5080_preset, rtx_3090ti_preset = for_rtx_5080, for_rtx_3090_ti

    def with_tile_size(self, tile: int) -> "AttentionConfig":
        """Return this config with another number of queries."""
        return replace(self, tile=tile)

    def shared_memory_bytes(self, dtype: Any = "float32") -> int:
        """Return the bytes that square tiles take: q, k, v, scores, row maxima and row sums.

        (3 tile head_dim + tile^2 + 2 tile) numbers, as the FlashAttention paper (Dao et al. 2022,
        algorithm 1) holds them on chip.  The kernels here keep the scores in registers:
        ``resolve(...).bytes`` is what they take.
        """
        numbers = 3 * self.tile * self.head_dim + self.tile**2 + 2 * self.tile
        return numbers * float_dtype("AttentionConfig.shared_memory_bytes", dtype).itemsize

    def resolve(
        self,
        device: Any,
        *,
        dim: int | None = None,
        value_dim: int | None = None,
        dtype: Any = "bfloat16",
        options: int = CAUSAL,
    ) -> Tiles:
        """Return the tiles that attention takes with this config: they launch on the device.

        Parameters
        ----------
        device : int or array or (architecture, bytes)
            A GPU's number, what lives there, or what to know of it: its compute capability, 86 for
            8.6, and the bytes of shared memory that a block may ask for.
        dim, value_dim : int
            Columns of q and k, of v: ``head_dim`` and dim by default.  Multiples of 8 up to 512.
        dtype : dtype or its name
            float16, bfloat16 or float32.
        options : int
            Which options leave registers for the tiles: 0 for causal and key lengths, 1 for what
            hides scores, such as a window or a mask, 2 for what changes them, such as a softcap.

        Returns
        -------
        tiles : Tiles
            ``rows`` (queries), ``keys`` of a stage, ``threads``, ``warps``, ``stages`` and more.

        Raises
        ------
        ConfigError, DTypeError
            device, a dim or options is nothing of the kind; there is no kernel for the dtype.
        KernelError
            No tiles fit: the definition runs there.
        DeviceError
            No such GPU is found.
        """
        if not is_integer(options) or options > ANY:
            raise ConfigError(f"AttentionConfig.resolve(options={options!r}): pass 0, 1 or 2")
        dim = self.head_dim if dim is None else dim
        value_dim = dim if value_dim is None else value_dim
        if not (is_integer(dim) and is_integer(value_dim)):
            given = f"dim={dim!r}, value_dim={value_dim!r}"
            raise ConfigError(f"AttentionConfig.resolve({given}): pass integers, columns of a head")
        try:
            kind = np.dtype(dtype)
        except TypeError:  # no name of a dtype
            kind = np.dtype(object)
        if kind not in KERNEL_DTYPES:
            known = ", ".join(each.name for each in KERNEL_DTYPES)
            raise DTypeError(f"AttentionConfig.resolve(dtype={dtype!r}): choose from {known}")
        there, start = _limits(device), Start(self.tile, self.block)
        found = None
        if not (dim % 8 or value_dim % 8) and min(dim, value_dim) > 0:
            found = resolve(kind.itemsize, dim, value_dim, options, there, start)
        if found is None:
            problem = f"no tiles for dim={dim}, value_dim={value_dim}, {kind} with {there}"
            cure = "head dims are multiples of 8 up to 512; other calls run the definition"
            raise KernelError(f"AttentionConfig.resolve: {problem}; {cure}")
        return found

    @contextmanager
    def use(self) -> Iterator[None]:
        """Let attention begin here, inside a ``with`` block."""
        before = _tiles.start
        _begin(Start(self.tile, self.block, self.warpgroups, self.one_pass))
        try:
            yield
        finally:
            _begin(before)


def _begin(start: Start | None) -> None:
    _tiles.start = start
    for op in OPS.values():
        op.routes.clear()  # calls that are known took other tiles


def _limits(device: Any) -> Limits:
    if isinstance(device, tuple) and len(device) == 2 and all(map(is_integer, device)):
        architecture, shared = map(int, device)
        return Limits(architecture, shared)
    if not isinstance(device, int | np.ndarray) and not hasattr(device, "device"):
        known = "a GPU's number, an array on it, or (architecture, bytes)"
        raise ConfigError(f"AttentionConfig.resolve(device={device!r}): pass {known}")
    if isinstance(device, np.ndarray) and target_of(device) is None:
        problem = "no kernel runs on an array of NumPy"
        raise KernelError(f"AttentionConfig.resolve: {problem}; pass a GPU's number or its limits")
    if not isinstance(device, int):
        return limits(device)
    try:
        return limits_of(device)
    except (ImportError, RuntimeError) as error:  # no CuPy, no driver, no GPU of this number
        known = "pass the number of a GPU, or what to know of one: (90, 227 * 1024)"
        problem = f"AttentionConfig.resolve(device={device}): no such GPU is found ({error})"
        raise DeviceError(f"{problem}; {known}") from error
