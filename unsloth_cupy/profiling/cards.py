"""GPUs by name: the properties that launches depend on, and rates from datasheets for floors."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..core import gpu
from ..core.call import is_number
from ..core.target import Limits
from ..errors import ConfigError


class Card(NamedTuple):
    """A GPU: bandwidth in GB/s, rates of products in TFLOP/s, without sparsity."""

    name: str
    architecture: int
    processors: int
    bandwidth: float | None = None
    products: float | None = None  # of float16 and bfloat16, summed in float32
    products32: float | None = None  # of float32, without tensor cores (no TF32)

    @property
    def limits(self) -> Limits:
        """The limits by which a kernel's launch chooses its configuration."""
        shared = SHARED[self.architecture] << 10
        return Limits(self.architecture, shared, self.processors, self.architecture >= 90)

    def rate(self, dtype: Any, family: str = "") -> float | None:
        """Return the TFLOP/s of products of a dtype, doubled for 8-bit codes; None if unknown."""
        wide = getattr(dtype, "name", str(dtype)) in ("float32", "float64")
        known = self.products32 if wide and family != "quantized" else self.products
        return known if known is None or family != "quantized" else 2 * known


# KiB of shared memory of a block: CUDA C++ Programming Guide, table of compute capabilities.
SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
# SMs of the largest GPU of each architecture: the default if only the architecture is known.
PROCESSORS = {80: 108, 86: 84, 89: 142, 90: 132, 100: 148, 120: 170}
CARDS: Mapping[str, Card] = {
    # NVIDIA A100 Tensor Core GPU datasheet: 2,039 and 1,555 GB/s, 312 and 19.5 TFLOPS
    "a100": Card("A100 80GB", 80, 108, 2039, 312, 19.5),
    "a10040gb": Card("A100 40GB", 80, 108, 1555, 312, 19.5),
    # NVIDIA A10 datasheet: 600 GB/s, 125 and 31.2 TFLOPS
    "a10": Card("A10", 86, 72, 600, 125, 31.2),
    # NVIDIA Ampere GA102 whitepaper: 936 GB/s, 71 (float32 sums) and 35.6 TFLOPS
    "rtx3090": Card("RTX 3090", 86, 82, 936, 71, 35.6),
    # NVIDIA Ada GPU architecture whitepaper: 1,008 GB/s, 165.2 (float32 sums) and 82.6 TFLOPS
    "rtx4090": Card("RTX 4090", 89, 128, 1008, 165.2, 82.6),
    # NVIDIA L4 datasheet: 300 GB/s, 242 TFLOPS with sparsity, which is twice that without; 30.3
    "l4": Card("L4", 89, 58, 300, 121, 30.3),
    # NVIDIA L40S datasheet: 864 GB/s, 362.05 and 91.6 TFLOPS
    "l40s": Card("L40S", 89, 142, 864, 362.05, 91.6),
    # NVIDIA H100 datasheet, SXM: 3.35 TB/s, 1,979 TFLOPS with sparsity, 67
    "h100": Card("H100 SXM", 90, 132, 3350, 989.5, 67),
    # NVIDIA H200 datasheet, SXM: 4.8 TB/s, 1,979 TFLOPS with sparsity, 67
    "h200": Card("H200", 90, 132, 4800, 989.5, 67),
    # NVIDIA HGX B200 datasheet, an eighth of it: 8 TB/s, 4.5 PFLOPS with sparsity, 75
    "b200": Card("B200", 100, 148, 8000, 2250, 75),
    # NVIDIA RTX Blackwell GPU architecture whitepaper: 1,792 GB/s, 209.5 (float32 sums), 104.8
    "rtx5090": Card("RTX 5090", 120, 170, 1792, 209.5, 104.8),
}
NAMES = (*CARDS, *(f"sm_{each}" for each in SHARED))
EXAMPLE = 'a mapping such as {"architecture": 90, "bandwidth": 4800, "products": 989.5}'


def card_of(device: Any) -> Card:
    """Return the card of a name ("h200"), an architecture ("sm_90"), a mapping or a NamedTuple."""
    if isinstance(device, Card):
        return _checked(device._asdict())
    if hasattr(device, "_asdict"):
        return _checked(device._asdict())
    if isinstance(device, Mapping):
        return _checked(dict(device))
    name = re.sub(r"[\s_-]|nvidia|geforce", "", str(device).lower())
    if name in CARDS:
        return CARDS[name]
    number = re.fullmatch(r"sm(\d+)a?", name)
    if number is not None:
        return _checked({"architecture": int(number[1])})
    known = ", ".join(NAMES)
    raise ConfigError(f"explain(device={device!r}): choose from {known}, or pass {EXAMPLE}")


def card_here(number: int) -> Card:
    """Return the GPU of this number in this machine, with the rates of its name if known."""
    gpu_name = gpu.cupy().cuda.runtime.getDeviceProperties(number)["name"].decode()
    limits = gpu.limits_of(number)
    words = re.sub(r"[\s-]", "", gpu_name.lower())
    matches = [key for key in CARDS if key in words]
    known = CARDS[max(matches, key=len)] if matches else None
    rates = known[3:] if known is not None and known.architecture == limits.architecture else ()
    return Card(gpu_name, limits.architecture, limits.processors, *rates)


def _checked(fields: dict[str, Any]) -> Card:
    """Return the card of these fields, or raise a ConfigError; missing rates are unknown."""
    call = f"explain(device={fields!r})"
    if unknown := fields.keys() - set(Card._fields):
        names = ", ".join(sorted(map(str, unknown)))
        raise ConfigError(f"{call}: {names} is not among {', '.join(Card._fields)}; pass {EXAMPLE}")
    architecture = fields.get("architecture")
    if architecture not in SHARED:
        known = ", ".join(map(str, SHARED))
        raise ConfigError(f"{call}: architecture is not one of {known}; pass {EXAMPLE}")
    for name in ("processors", "bandwidth", "products", "products32"):
        value = fields.get(name)
        if value is not None and not (is_number(value) and 0 < value < float("inf")):
            raise ConfigError(f"{call}: {name} is not a number above 0; pass {EXAMPLE}")
    values = {"name": f"sm_{architecture}", "processors": PROCESSORS[architecture], **fields}
    return Card(**values)
