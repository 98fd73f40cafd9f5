"""Upper limits of attention's tiles, by default or for a kind of GPU.

    AttentionConfig.for_rtx_5080().resolve(0, dim=64)   the tiles on GPU 0
    with AttentionConfig(tile=64).use(): ...            attention uses such tiles inside

A tile needs shared memory and registers, so not every GPU can launch the same sizes: ``resolve``
returns the largest tiles within the limits that the GPU can launch.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ...core.call import check_options, is_integer
from ...core.dtypes import KERNEL_DTYPES, float_dtype
from ...core.gpu import limits_of
from ...core.replay import choices
from ...core.target import Limits, limits, target_of
from ...errors import ConfigError, DeviceError, DTypeError, KernelError
from ._options import ANY, CAUSAL
from ._tiles import Start, Tiles, resolve


@check_options
@dataclass(frozen=True)
class AttentionConfig:
    """Upper limits of the tiles of the forward pass, and of the threads of a block.

    Without a config, attention uses the best tiles of its table for the GPU, the head dim and the
    options of a call.  A config is for measuring other tiles: each entry of the table is halved
    until it is within the limits, and attention uses the best entry with the most queries.  A
    smaller ``tile`` takes less shared memory, unless the GPU has no room for the larger one;
    ``explain`` shows how much.

    Parameters
    ----------
    tile : int
        Maximum number of queries of a block, and of keys that it reads at a time; 16 or more.
    block : int
        Maximum number of threads of a block; 32 or more.
    head_dim : int
        Columns of a head, 1 or more: the default of ``resolve`` and ``shared_memory_bytes``.
    warpgroups : bool
        On Hopper, run attention_forward_sm90.cu and attention_backward_sm90.cu for the calls that
        they support, as without a config; tile and block then apply only to other calls.
    one_pass : bool or None
        With warpgroups, whether a single launch computes dq, dk and dv where it can: head dims up
        to 128, and no mask, block mask, bias, ALiBi slopes or soft cap.  None: only from head dim
        65 on, where it is faster.

    Raises
    ------
    ConfigError
        A number is too small, an option has the wrong type, or one_pass is set without warpgroups.
    """

    tile: int = 128
    block: int = 256
    head_dim: int = 64
    warpgroups: bool = True
    one_pass: bool | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name, least in (("tile", 16), ("block", 32), ("head_dim", 1)):
            value = getattr(self, name)
            if not is_integer(value, least):
                problem = f"AttentionConfig({name}={value!r})"
                raise ConfigError(f"{problem}: pass an integer, {least} or more")
        if self.one_pass is not None and not self.warpgroups:
            argument = f"one_pass={self.one_pass}"
            problem = f"AttentionConfig({argument}): only the warpgroup kernels have this option"
            raise ConfigError(f"{problem}; pass AttentionConfig({argument})")

    @classmethod
    def for_rtx_5080(cls) -> "AttentionConfig":
        """Return a config for an RTX 5080: one block fills its 99 KB of shared memory."""
        return cls(tile=128, block=256)

    @classmethod
    def for_rtx_3090_ti(cls) -> "AttentionConfig":
        """Return a config for an RTX 3090 Ti: two or more blocks share its 99 KB of shared memory.

        They hide each other's loads, more of which go to memory than on an RTX 5080: the L2 cache
        has 6 MB, and on an RTX 5080 64 MB.
        """
        return cls(tile=64, block=128)

    @classmethod
    def for_datacenter(cls) -> "AttentionConfig":
        """Return a config for an A100 or H100: 163 or 227 KB of shared memory per block."""
        return cls(tile=256, block=256)

    rtx_5080_preset, rtx_3090ti_preset = for_rtx_5080, for_rtx_3090_ti

    def with_tile_size(self, tile: int) -> "AttentionConfig":
        """Return this config with another upper limit for queries and keys."""
        return replace(self, tile=tile)

    def shared_memory_bytes(self, dtype: Any = "float32") -> int:
        """Return the bytes of square tiles of q, k, v and scores, with row maxima and row sums.

        (3 tile head_dim + tile^2 + 2 tile) numbers: what the FlashAttention paper (Dao et al. 2022,
        algorithm 1) keeps on chip.  The kernels here keep the scores in registers;
        ``resolve(...).bytes`` returns the shared memory that they need.
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
        """Return the tiles that attention uses with this config; the device can launch them.

        Parameters
        ----------
        device : int or array or (architecture, bytes)
            A GPU's number, an array on it, or its limits: the compute capability, 86 for 8.6, and
            the bytes of shared memory that a block may request.
        dim, value_dim : int
            Columns of q and k, and of v; by default ``head_dim`` and dim.  Multiples of 8 up to
            512.
        dtype : dtype or its name
            float16, bfloat16 or float32.
        options : int
            The options for which the tiles must leave registers: 0 for causal and key lengths, 1
            also for options that hide scores, such as a window or a mask, 2 also for options that
            change scores, such as a softcap.

        Returns
        -------
        tiles : Tiles
            ``rows`` (queries), ``keys`` of a stage, ``threads``, ``warps``, ``stages`` and more.

        Raises
        ------
        ConfigError, DTypeError
            device, a dim or options has a wrong type or value; there is no kernel for the dtype.
        KernelError
            No tiles fit: the NumPy definition runs for such calls.
        DeviceError
            There is no such GPU.
        """
        if not is_integer(options) or options > ANY:
            raise ConfigError(f"AttentionConfig.resolve(options={options!r}): pass 0, 1 or 2")
        dim = self.head_dim if dim is None else dim
        value_dim = dim if value_dim is None else value_dim
        if not (is_integer(dim) and is_integer(value_dim)):
            arguments = f"dim={dim!r}, value_dim={value_dim!r}"
            raise ConfigError(
                f"AttentionConfig.resolve({arguments}): pass integers, the columns of a head"
            )
        try:
            kind = np.dtype(dtype)
        except (TypeError, ValueError):  # not the name of a dtype
            kind = np.dtype(object)
        if kind not in KERNEL_DTYPES:
            names = ", ".join(each.name for each in KERNEL_DTYPES)
            raise DTypeError(f"AttentionConfig.resolve(dtype={dtype!r}): choose from {names}")
        device_limits, start = _limits(device), Start(self.tile, self.block)
        tiles = None
        if not (dim % 8 or value_dim % 8) and min(dim, value_dim) > 0:
            tiles = resolve(kind.itemsize, dim, value_dim, options, device_limits, start)
        if tiles is None:
            problem = f"no tiles for dim={dim}, value_dim={value_dim}, {kind} with {device_limits}"
            cure = "head dims are multiples of 8 up to 512; other calls run the NumPy definition"
            raise KernelError(f"AttentionConfig.resolve: {problem}; {cure}")
        return tiles

    @contextmanager
    def use(self) -> Iterator[None]:
        """Make attention use this config inside a ``with`` block, in this thread or asyncio task.

        Gradients of attention use the config of the forward pass, wherever the backward pass runs:
        on a tape, in torch's own threads, and in functions that JAX has traced in the block.  (A
        graph of ``torch.compile`` does not store it: its backward pass uses the config of its
        thread.)
        Of nested blocks, which may end in any order, the one that was entered last applies.
        """
        own = Start(self.tile, self.block, self.warpgroups, self.one_pass)
        choices.set((*choices.get(), own))
        try:
            yield
        finally:
            choices.set(tuple(each for each in choices.get() if each is not own))


def _limits(device: Any) -> Limits:
    """Return the limits of a device, or raise ConfigError, KernelError or DeviceError."""
    if isinstance(device, tuple) and len(device) == 2 and all(map(is_integer, device)):
        architecture, shared = map(int, device)
        return Limits(architecture, shared)
    if not isinstance(device, int | np.ndarray) and not hasattr(device, "device"):
        cure = "pass a GPU's number, an array on it, or (architecture, bytes)"
        raise ConfigError(f"AttentionConfig.resolve(device={device!r}): {cure}")
    if isinstance(device, np.ndarray) and target_of(device) is None:
        problem = "kernels do not run on NumPy arrays"
        raise KernelError(f"AttentionConfig.resolve: {problem}; pass a GPU's number or its limits")
    if not isinstance(device, int):
        return limits(device)
    try:
        return limits_of(device)
    except (ImportError, RuntimeError, OverflowError) as error:  # no CuPy, driver or such GPU
        cure = "pass the number of a GPU, or the limits of one: (90, 227 * 1024)"
        problem = f"AttentionConfig.resolve(device={device}): no such GPU is found ({error})"
        raise DeviceError(f"{problem}; {cure}") from error
