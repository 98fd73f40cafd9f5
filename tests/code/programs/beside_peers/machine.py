"""Arrays, clocks and memory of the machine that the contestants of a case share."""

import gc
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

import unsloth_cupy  # noqa: F401 -- registers torch
from unsloth_cupy.core.frameworks import FRAMEWORKS

WARM, RUNS, HOST_RUNS = 3, 25, 20
L2 = 256 << 20  # bytes, overwritten before each call: more than any L2 cache holds
PERIOD = 0.003  # seconds between two samples of the card's memory


class Machine(NamedTuple):
    """A GPU, or the CPU for tests of this program."""

    on_gpu: bool

    @property
    def device(self) -> str:
        """The device of torch."""
        return "cuda" if self.on_gpu else "cpu"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and activations."""
        return torch.bfloat16 if self.on_gpu else torch.float32

    def random(self, *shape: int, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
        """Return normal values; equal arguments give equal values."""
        generator = torch.Generator(self.device).manual_seed(seed)
        values = torch.randn(*shape, generator=generator, device=self.device)
        return (values * scale).to(self.dtype)

    def ours(self, value: Any) -> Any:
        """Return a tensor as an array over the same memory; other values unchanged."""
        if not isinstance(value, torch.Tensor):
            return value
        return FRAMEWORKS["torch"].adopt(value.detach().contiguous())

    def tensor(self, value: Any) -> torch.Tensor:
        """Return an array as a tensor over the same memory."""
        if isinstance(value, torch.Tensor):
            return value
        value = np.asarray(value) if isinstance(value, np.generic) else value
        result: torch.Tensor = FRAMEWORKS["torch"].give_back(value, None)
        return result

    def wait(self) -> None:
        """Wait for the GPU."""
        if self.on_gpu:
            torch.cuda.synchronize()


class Clock:
    """Times calls in turns: by device events after a flush of L2, or by the host's clock."""

    def __init__(self, machine: Machine) -> None:
        self.on_gpu, self.wait = machine.on_gpu, machine.wait
        self.buffer = torch.empty(L2, dtype=torch.uint8, device="cuda") if self.on_gpu else None

    def __call__(self, calls: Mapping[str, Callable[[], Any]]) -> dict[str, list[float]]:
        """Return the median, the first and the third quartile of each call in seconds."""
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        warm, runs = (WARM, RUNS) if self.on_gpu else (0, 3)
        for turn in range(warm + runs):
            for name, call in calls.items():
                duration = self.once(call)
                if turn >= warm:
                    seconds[name].append(duration)
        return {name: np.percentile(all_, (50, 25, 75)).tolist() for name, all_ in seconds.items()}

    def once(self, call: Callable[[], Any]) -> float:
        """Return the seconds of one call."""
        if self.buffer is None:
            start = time.perf_counter()
            call()
            return time.perf_counter() - start
        self.buffer.zero_()
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        call()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) * 1e-3

    def host(self, call: Callable[[], Any]) -> float:
        """Return the seconds that the host takes for a call, while the GPU is behind."""
        self.wait()
        start = time.perf_counter()
        for _ in range(HOST_RUNS if self.on_gpu else 1):
            call()
        seconds = time.perf_counter() - start
        self.wait()
        return seconds / (HOST_RUNS if self.on_gpu else 1)


def held(machine: Machine, call: Callable[[], Any]) -> int:
    """Return the most bytes that a call holds, of both allocators, beyond those before it."""
    if not machine.on_gpu:
        return 0
    import cupy

    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    torchs, cupys = torch.cuda.memory_allocated(), pool.used_bytes()

    class Peak(cupy.cuda.memory_hook.MemoryHook):  # type: ignore[misc]
        name = "peak"
        most = cupys

        def malloc_postprocess(self, **_: Any) -> None:
            self.most = max(self.most, pool.used_bytes())

    with Peak() as hook:
        call()
        torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated() - torchs + hook.most - cupys)


class CardMemory:
    """The most memory of the card that is in use, by NVML, whichever allocator owns it.

    It counts beyond what is in use now, from ``begin`` on.
    """

    def __init__(self, machine: Machine) -> None:
        self.most, self.end = 0, threading.Event()
        self.used: Callable[[], int] = lambda: 0
        if machine.on_gpu:
            import pynvml

            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByIndex(0)
            self.used = lambda: int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
        self.before = self.used()

    def begin(self) -> None:
        """Sample from now on, in a thread."""
        self.most = self.used()

        def sample() -> None:
            while not self.end.wait(PERIOD):
                self.most = max(self.most, self.used())

        threading.Thread(target=sample, daemon=True).start()

    def bytes(self) -> int:
        """Return the most bytes beyond those before."""
        self.end.set()
        return self.most - self.before


def ceilings(machine: Machine) -> dict[str, Any]:
    """Return the rates of a copy and of a product of this card, which bound an op."""
    if not machine.on_gpu:
        return {"device": "CPU", "torch": torch.__version__}
    size = 8192
    a, b = (machine.random(size, size, seed=seed) for seed in (1, 2))
    source, target = (torch.empty(1 << 31, dtype=torch.uint8, device="cuda") for _ in range(2))
    seconds = Clock(machine)({"product": lambda: a @ b, "copy": lambda: target.copy_(source)})
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "product_tflop_per_s": 2 * size**3 / seconds["product"][0] / 1e12,
        "copy_gb_per_s": 2 * source.numel() / seconds["copy"][0] / 1e9,
    }
