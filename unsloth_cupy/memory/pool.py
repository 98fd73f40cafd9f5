"""Measures memory while a program runs: the bytes of arrays, their peak, and an optional limit.

    with memory_pool(limit=8 << 30) as pool:
        train()
    print(format_bytes(pool.peak), pool.efficiency)

With a GPU, it watches the pool of CuPy; without one, NumPy allocations through tracemalloc, which
slows small ops down by up to a factor of 2.
"""

import threading
from collections import Counter
from collections.abc import Iterable
from types import TracebackType
from typing import Any

from ..core import gpu
from ..core.call import is_integer
from ..errors import ConfigError, DeviceError, DeviceMemoryError
from ..machine import bytes_requested, format_bytes, gpu_memory
from ..training import offload
from .host import HostCounter, Usage


class MemoryPool:
    """Counts the bytes of arrays inside a ``with`` block; see ``memory_pool``."""

    def __init__(self, limit: int | None, device: int | None, held: Iterable[Any]) -> None:
        self.limit, self.device = None if limit is None else int(limit), device
        self.held = {id(array): array.nbytes for array in held}
        self._source: Any = None

    def __enter__(self) -> "MemoryPool":
        """Start counting."""
        if self._source is not None:
            raise ConfigError("memory_pool: this pool is in use; create another")
        gpus = gpu.count()
        if self.device is not None and self.device >= gpus:
            known = f"CuPy sees {gpus} GPUs; leave device out"
            raise DeviceError(f"memory_pool(device={self.device}): {known}")
        devices = range(gpus) if self.device is None else [self.device]
        own = sum(self.held.values())
        self._source = OnDevices(devices, self.limit) if gpus else HostCounter(self.limit, own)
        self._source.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop counting; CuPy's OutOfMemoryError becomes a DeviceMemoryError."""
        try:
            if kind is None and isinstance(self._source, HostCounter):
                self._source.check("the block")
        finally:
            self._source.stop()
        if kind is not None and kind.__name__ == "OutOfMemoryError":
            required = bytes_requested(error)
            most = self.limit or _total(self.device)
            raise DeviceMemoryError(
                f"memory_pool(limit={self.limit}): {format_bytes(required)} more do not fit, as"
                f" arrays hold {format_bytes(self.allocated)}; raise the limit, or compute in"
                " smaller batches",
                required + self.allocated,
                most,
            ) from error

    @property
    def by_device(self) -> dict[str, Usage]:
        """The usage by device: "cuda:0" and so on, or "cpu" without a GPU."""
        return dict(self._source.usage()) if self._source else {}

    @property
    def allocated(self) -> int:
        """The bytes of all arrays now, on all devices."""
        return sum(usage.allocated for usage in self.by_device.values())

    @property
    def peak(self) -> int:
        """The peak of ``allocated`` since the start of the block or since ``reset_peak``."""
        return int(self._source.peak()) if self._source else 0

    @property
    def efficiency(self) -> float:
        """The share of the reserved bytes that arrays use: 1 if nothing else is reserved."""
        reserved = sum(usage.reserved for usage in self.by_device.values())
        return self.allocated / reserved if reserved else 1.0

    @property
    def sizes(self) -> dict[int, int]:
        """The number of memory blocks by size, allocated in the ``with`` block and held now."""
        return dict(sorted(self._source.counts().items())) if self._source else {}

    @property
    def count(self) -> int:
        """The number of blocks in ``sizes``."""
        return sum(self.sizes.values())

    @property
    def fragmentation(self) -> float:
        """The share of the reserved bytes that no array uses: 0 on a CPU."""
        return 1 - self.efficiency

    @property
    def transferred(self) -> dict[str, int]:
        """Bytes copied in the block by ``to_host``, ``to_device`` and checkpoints."""
        before = self._source.moved if self._source else offload.moved
        return {name: offload.moved[name] - count for name, count in before.items()}

    def reset_peak(self) -> None:
        """Reset ``peak`` to the bytes that are held now."""
        if self._source:
            self._source.reset_peak()


def memory_pool(
    limit: int | None = None, device: int | None = None, *, held: Iterable[Any] = ()
) -> MemoryPool:
    """Return a context manager that counts the bytes of arrays and enforces a limit.

    Parameters
    ----------
    limit : int, optional
        Maximum bytes of arrays per device.  CuPy's pool refuses to allocate more.  Without a GPU,
        the limit is checked when an op returns, and at the end of the block.
    device : int, optional
        The GPU to watch; None watches all GPUs.
    held : iterable of array
        Arrays that exist before the block, such as the weights of a model, for a CPU: tracemalloc
        does not count them, nor memory that NumPy did not allocate (``np.memmap``, torch).  A model
        that ``load`` reads inside the block is counted.  On a GPU, the pool of CuPy counts all its
        allocations.

    Returns
    -------
    pool : MemoryPool
        ``allocated``, ``peak`` and ``efficiency`` over all devices, ``by_device``,
        ``transferred``; ``count``, ``sizes`` and ``fragmentation`` of memory blocks;
        ``reset_peak()``.  All numbers are 0 before the block.

    Raises
    ------
    ConfigError
        The limit is not positive, or the device is not a number.
    DeviceError
        There is no such device.
    DeviceMemoryError
        Raised inside the block if arrays do not fit.
    """
    if limit is not None and not is_integer(limit, 1):
        raise ConfigError(f"memory_pool(limit={limit!r}): pass bytes, as in limit=8 << 30")
    if device is not None and (type(device) is not int or device < 0):
        raise ConfigError(f"memory_pool(device={device!r}): pass the number of a GPU, as device=0")
    return MemoryPool(limit, device, held)


def _total(device: int | None) -> int:
    """Return the total memory of a GPU in bytes, or of all GPUs for None."""
    numbers = range(gpu.count()) if device is None else [device]
    return sum(gpu_memory(number)[1] for number in numbers)


# by GPU: (pool, limit) of all active pools; the first pair is (None, limit before them)
_limits: dict[int, list[tuple[Any, Any]]] = {}
_limits_lock = threading.Lock()


class OnDevices:
    """Counts allocations of CuPy's pool with a hook, for the thread that entered the block."""

    def __init__(self, devices: Any, limit: int | None) -> None:
        self.cupy = gpu.cupy()
        self.devices, self.limit, self.moved = [*devices], limit, dict(offload.moved)
        self.pool = self.cupy.get_default_memory_pool()
        self.last: dict[str, Usage] | None = None
        self.sizes = Counter[int]()  # number of held blocks by size in bytes

    def start(self) -> None:
        """Install a hook into the pool, then set the limit."""
        self.held, self.most = {}, {}
        for device in self.devices:
            with self.cupy.cuda.Device(device):
                self.held[device] = self.most[device] = self.pool.used_bytes()
        self.top = sum(self.held.values())
        self.hook = _hook(self)
        self.hook.__enter__()
        for device in self.devices if self.limit is not None else ():
            with _limits_lock, self.cupy.cuda.Device(device):
                _limits.setdefault(device, [(None, self.pool.get_limit())])
                _limits[device].append((self, self.limit))
                self.pool.set_limit(size=self.limit)

    def note(self, device: int, size: int) -> None:
        """Count an allocation of ``size`` bytes, or a free if ``size`` is negative."""
        if device in self.held and self.last is None:
            self.sizes[abs(size)] += 1 if size > 0 else -1
            self.held[device] += size
            self.most[device] = max(self.most[device], self.held[device])
            self.top = max(self.top, sum(self.held.values()))

    def stop(self) -> None:
        """Store the final numbers, remove the hook, and restore the limit."""
        self.last = self.usage()
        self.hook.__exit__(None, None, None)
        for device in self.devices if self.limit is not None else ():
            with _limits_lock, self.cupy.cuda.Device(device):
                left = [pair for pair in _limits.pop(device) if pair[0] is not self]
                self.pool.set_limit(size=left[-1][1])
                if len(left) > 1:  # pools of other threads
                    _limits[device] = left

    def usage(self) -> dict[str, Usage]:
        """Return the bytes of each device."""
        if self.last is not None:
            return self.last
        result = {}
        for device in self.devices:
            with self.cupy.cuda.Device(device):
                reserved = self.pool.total_bytes()
            result[f"cuda:{device}"] = Usage(self.held[device], self.most[device], reserved)
        return result

    def peak(self) -> int:
        """Return the peak of the held bytes."""
        return self.top

    def counts(self) -> Counter[int]:
        """Return the number of held blocks by size; frees of earlier blocks do not count."""
        return +self.sizes

    def reset_peak(self) -> None:
        """Reset the peaks to the bytes that are held now."""
        self.most = dict(self.held)
        self.top = sum(self.held.values())


def _hook(pool: OnDevices) -> Any:
    """Return a memory hook for CuPy that reports allocations and frees to a pool."""

    class Hook(pool.cupy.cuda.MemoryHook):  # type: ignore[name-defined]
        name = f"unsloth_cupy {id(pool)}"  # CuPy accepts each name once; pools may be nested

        def malloc_postprocess(self, **about: Any) -> None:
            pool.note(about["device_id"], about["mem_size"])

        def free_postprocess(self, **about: Any) -> None:
            pool.note(about["device_id"], -about["mem_size"])

    return Hook()
