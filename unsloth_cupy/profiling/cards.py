"""GPUs by name: properties that launches depend on, memory, and rates for the roofline."""

import difflib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..core import gpu
from ..core.call import is_number
from ..core.target import Limits
from ..errors import ConfigError
from ..kernel_cache import OLDEST


class Card(NamedTuple):
    """A GPU: bandwidth in GB/s, rates of matrix products in TFLOP/s, without sparsity.

    ``memory`` is its size in GiB.
    """

    name: str
    architecture: int
    processors: int
    bandwidth: float | None = None
    products: float | None = None  # float16 and bfloat16, with float32 accumulation
    products32: float | None = None  # float32 without tensor cores (no TF32)
    source: str = "from the datasheet"  # of the rates
    memory: float | None = None

    @property
    def link(self) -> float:
        """GB/s between host and GPU in one direction, pinned: 80 % of PCIe 4.0 or 5.0 x16."""
        return 25.0 if self.architecture < 90 else 50.0

    @property
    def limits(self) -> Limits:
        """The limits from which a launch chooses its configuration."""
        shared = SHARED[self.architecture] << 10
        return Limits(self.architecture, shared, self.processors, self.architecture >= 90)

    def rate(self, dtype: Any, family: str = "") -> float | None:
        """Return the TFLOP/s of matrix products, doubled for 8-bit codes; None if unknown."""
        wide = getattr(dtype, "name", str(dtype)) in ("float32", "float64")
        rate = self.products32 if wide and family != "quantized" else self.products
        return rate if rate is None or family != "quantized" else 2 * rate


# KiB of shared memory per block: CUDA C++ Programming Guide, table of compute capabilities.
SHARED = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}
# SMs of the largest GPU of each architecture: the default if only the architecture is known.
PROCESSORS = {80: 108, 86: 84, 87: 16, 89: 142, 90: 132, 100: 148, 103: 148, 120: 188, 121: 48}

# NVIDIA's datasheets: SMs, GB/s, TFLOP/s.  Rates stated with sparsity are halved, and rates of a
# board with eight GPUs are divided by 8.
SERVERS = {
    "a100": Card("A100 80GB", 80, 108, 2039, 312, 19.5),
    "a100 40gb": Card("A100 40GB", 80, 108, 1555, 312, 19.5),
    "a100 80gb pcie": Card("A100 80GB PCIe", 80, 108, 1935, 312, 19.5),
    "a30": Card("A30", 80, 56, 933, 165, 10.3),
    "a40": Card("A40", 86, 84, 696, 149.7, 37.4),
    "a10": Card("A10", 86, 72, 600, 125, 31.2),
    "a10g": Card("A10G", 86, 80, 600, 70, 35),
    "agx orin": Card("Jetson AGX Orin", 87, 16, 204.8, 42.5, 5.3),
    "l4": Card("L4", 89, 58, 300, 121, 30.3),
    "l40": Card("L40", 89, 142, 864, 181.05, 90.5),
    "l40s": Card("L40S", 89, 142, 864, 362.05, 91.6),
    "h20": Card("H20", 90, 78, 4000, 148, 44),
    "h100": Card("H100 SXM", 90, 132, 3350, 989.5, 67),
    "h100 pcie": Card("H100 PCIe", 90, 114, 2000, 756, 51),
    "h100 nvl": Card("H100 NVL", 90, 132, 3900, 835.5, 60),
    "h200": Card("H200", 90, 132, 4800, 989.5, 67),
    "h200 nvl": Card("H200 NVL", 90, 132, 4800, 835.5, 60),
    "gh200": Card("GH200", 90, 132, 4000, 989.5, 67),
    "gh200 144gb": Card("GH200 144GB", 90, 132, 4900, 989.5, 67),
    "b200": Card("B200", 100, 148, 8000, 2250, 75),
    "b300": Card("B300", 103, 148, 8000, 2250, 75),
    "gb10": (spark := Card("GB10", 121, 48, 273)),  # the rate of 16-bit products is not published
    "dgx spark": spark,
}
# Datasheets of the RTX workstation GPUs: 16-bit products run at 4 times the rate of float32, by the
# published rates for float32 and for 8- or 4-bit floats.  RTX PRO 6000 Server: "RTX PRO 6000
# Blackwell Server Edition", December 2025, page 3 (1597 GB/s, 120 TFLOP/s).  RTX PRO 6000 Max-Q:
# 110 TFLOP/s are 188 SMs of 256 operations a cycle at a boost clock of 2288 MHz.
WORKSTATIONS = {
    "rtx a4000": ("RTX A4000", 86, 48, 448, 19.2),
    "rtx a5000": ("RTX A5000", 86, 64, 768, 27.8),
    "rtx a6000": ("RTX A6000", 86, 84, 768, 38.7),
    "rtx 4000 ada": ("RTX 4000 Ada", 89, 48, 360, 26.7),
    "rtx 4000 sff ada": ("RTX 4000 SFF Ada", 89, 48, 280, 19.2),
    "rtx 4500 ada": ("RTX 4500 Ada", 89, 60, 432, 39.6),
    "rtx 5000 ada": ("RTX 5000 Ada", 89, 100, 576, 65.3),
    "rtx 6000 ada": ("RTX 6000 Ada", 89, 142, 960, 91.1),
    "rtx pro 6000": ("RTX PRO 6000", 120, 188, 1792, 125),
    "rtx pro 6000 max-q": ("RTX PRO 6000 Max-Q", 120, 188, 1792, 110),
    "rtx pro 6000 server": ("RTX PRO 6000 Server", 120, 188, 1597, 120),
}
# GeForce: the appendices of the whitepapers of Ampere GA102, Ada and RTX Blackwell, and NVIDIA's
# pages of the later cards.  16-bit products with float32 sums run at twice the rate of float32.
GEFORCE = {
    "rtx 3060": ("RTX 3060", 86, 28, 360, 12.7),
    "rtx 3060 ti": ("RTX 3060 Ti", 86, 38, 448, 16.2),
    "rtx 3070": ("RTX 3070", 86, 46, 448, 20.3),
    "rtx 3070 ti": ("RTX 3070 Ti", 86, 48, 608, 21.7),
    "rtx 3080": ("RTX 3080", 86, 68, 760, 29.8),
    "rtx 3080 12gb": ("RTX 3080 12GB", 86, 70, 912, 30.6),
    "rtx 3080 ti": ("RTX 3080 Ti", 86, 80, 912, 34.1),
    "rtx 3090": ("RTX 3090", 86, 82, 936, 35.6),
    "rtx 3090 ti": ("RTX 3090 Ti", 86, 84, 1008, 40),
    "rtx 4060": ("RTX 4060", 89, 24, 272, 15.1),
    "rtx 4060 ti": ("RTX 4060 Ti", 89, 34, 288, 22.1),
    "rtx 4070": ("RTX 4070", 89, 46, 504, 29.1),
    "rtx 4070 super": ("RTX 4070 Super", 89, 56, 504, 35.5),
    "rtx 4070 ti": ("RTX 4070 Ti", 89, 60, 504, 40.1),
    "rtx 4070 ti super": ("RTX 4070 Ti Super", 89, 66, 672, 44.1),
    "rtx 4080": ("RTX 4080", 89, 76, 716.8, 48.7),
    "rtx 4080 super": ("RTX 4080 Super", 89, 80, 736, 52.2),
    "rtx 4090 d": ("RTX 4090 D", 89, 114, 1008, 73.5),
    "rtx 4090": ("RTX 4090", 89, 128, 1008, 82.6),
    "rtx 5060": ("RTX 5060", 120, 30, 448, 19.2),
    "rtx 5060 ti": ("RTX 5060 Ti", 120, 36, 448, 23.7),
    "rtx 5070": ("RTX 5070", 120, 48, 672, 30.9),
    "rtx 5070 ti": ("RTX 5070 Ti", 120, 70, 896, 43.9),
    "rtx 5080": ("RTX 5080", 120, 84, 960, 56.3),
    "rtx 5090": ("RTX 5090", 120, 170, 1792, 104.8),
}
# GiB of memory, by the same datasheets; of the smaller version where a card has two.  A name may
# have the size too: "rtx 4060 ti 16gb".
MEMORY = {
    8: ("rtx 3060 ti", "rtx 3070", "rtx 3070 ti", "rtx 4060", "rtx 4060 ti", "rtx 5060",
        "rtx 5060 ti"),
    10: ("rtx 3080",),
    12: ("rtx 3060", "rtx 3080 12gb", "rtx 3080 ti", "rtx 4070", "rtx 4070 super", "rtx 4070 ti",
         "rtx 5070"),
    16: ("rtx a4000", "rtx 4070 ti super", "rtx 4080", "rtx 4080 super", "rtx 5070 ti", "rtx 5080"),
    20: ("rtx 4000 ada", "rtx 4000 sff ada"),
    24: ("a30", "a10", "a10g", "l4", "rtx a5000", "rtx 4500 ada", "rtx 3090", "rtx 3090 ti",
         "rtx 4090 d", "rtx 4090"),
    32: ("rtx 5000 ada", "rtx 5090"),
    40: ("a100 40gb",),
    48: ("a40", "l40", "l40s", "rtx a6000", "rtx 6000 ada"),
    64: ("agx orin",),
    80: ("a100", "a100 80gb pcie", "h100", "h100 pcie"),
    94: ("h100 nvl",),
    96: ("h20", "gh200", "rtx pro 6000", "rtx pro 6000 max-q", "rtx pro 6000 server"),
    128: ("gb10", "dgx spark"),
    141: ("h200", "h200 nvl"),
    144: ("gh200 144gb",),
    180: ("b200",),
}  # fmt: skip
_RATES: Mapping[str, Card] = (
    SERVERS
    | {key: Card(*row[:4], 4 * row[4], row[4]) for key, row in WORKSTATIONS.items()}
    | {key: Card(*row[:4], 2 * row[4], row[4]) for key, row in GEFORCE.items()}
)
_SIZES = {key: size for size, keys in MEMORY.items() for key in keys}
CARDS = {key: card._replace(memory=_SIZES.get(key)) for key, card in _RATES.items()}
# Rates that a run measured, which no kernel exceeds by much: docs/performance.md, run 1.
MEASURED: Mapping[str, dict[str, Any]] = {
    "H200": {
        "bandwidth": 4224.0,
        "products": 793.0,
        "products32": 51.0,
        "source": "measured on an H200, 2026-11-26",
    }
}
# Fractions of the H200's datasheet that the run above reached: 4224 of 4800 GB/s, 793 of 989.5.
FRACTIONS = {"memory": 0.88, "products": 0.80}
# Fractions of the roofline that kernels of a training step reached on the H200: the best bfloat16
# row of each op in docs/performance.json.  Products of cuBLAS define the rate of products: 1.
EFFICIENCY: Mapping[str, float] = {
    "attention_forward": 0.86, "attention_backward": 0.64,
    "attention_varlen_forward": 0.86, "attention_varlen_backward": 0.66,
    "linear_cross_entropy_gradients": 0.70, "linear_cross_entropy_forward": 0.78,
    "linear_cross_entropy_backward": 0.69,
    "experts_mlp_forward": 0.72, "experts_mlp_backward": 0.66,
    "gated_delta_rule": 0.13, "gated_delta_rule_backward": 0.07,
    "causal_conv": 0.53, "causal_conv_backward": 0.35,
    "rms_norm_forward": 0.81, "rms_norm_backward": 0.64,
    "layer_norm_forward": 0.83, "layer_norm_backward": 0.66,
    "gated_rms_norm_forward": 0.79, "gated_rms_norm_backward": 0.71,
    "qk_norm_rope_forward": 0.77, "qk_norm_rope_backward": 0.66,
    "swiglu": 0.90, "swiglu_backward": 0.91, "geglu": 0.63, "geglu_backward": 0.73,
    "embedding_backward": 0.41,
    "int8_linear_forward": 0.29, "bit_linear_forward": 0.29, "ternary_linear_forward": 0.18,
}  # fmt: skip
OTHER_OPS = 0.80  # the median of the best rows of all ops
# Names of GPUs that are too old for the kernels, by architecture: the same programming guide.
OLDER = {
    75: r"t4g?|(gtx)?16[356]0.*|(rtx)?20[5678]0.*|titanrtx",
    70: r"v100.*|titanv",
    61: r"(gtx)?10[5678]0.*|p4|p40|titanxp?",
    60: r"p100.*",
}
NAMES = (*CARDS, *(f"sm_{each}" for each in SHARED))
EXAMPLE = 'a mapping such as {"architecture": 90, "bandwidth": 4800, "products": 989.5}'
# TOKENS splits a name into words; SILENT are words that do not distinguish GPUs: makers, editions,
# memory and sockets.
TOKENS = r"\d{3}(?=\d{2}gb)|\d+gb|(?:sxm|hbm)\d*e?|[a-z]+|\d+"
MAKERS = (
    "nvidia|tesla|geforce|rtx|jetson|blackwell|gpu|tensor|core|generation|founders|workstation"
    "|edition|ac"
)
SILENT = rf"{MAKERS}|\d+gb|(?:sxm|hbm)\d*e?|pcie"


def card_of(device: Any) -> Card:
    """Return the card for a name ("h200"), architecture ("sm_90"), mapping or NamedTuple."""
    if hasattr(device, "_asdict"):
        device = device._asdict()
    if isinstance(device, Mapping):
        return _checked(dict(device))
    try:
        return card_named(str(device))
    except ConfigError as error:
        raise ConfigError(f"explain(device={device!r}): {error}, or pass {EXAMPLE}") from None


def card_named(name: str) -> Card:
    """Return the card for a name in any spelling or an architecture, or raise a ConfigError."""
    plain = re.sub(r"[\W_]|nvidia|geforce|tesla", "", name.lower())
    number = re.fullmatch(r"(?:sm|compute|cc)_?(\d+)[af]?|(?:cc ?)?(\d+)\.(\d)", name.lower())
    older = [arch for arch, pattern in OLDER.items() if re.fullmatch(pattern, plain)]
    architecture = int("".join(filter(None, number.groups()))) if number else (older or [0])[0]
    if architecture in SHARED:
        return _checked({"architecture": architecture})
    if 0 < architecture < OLDEST:
        its = f"{name} is sm_{architecture}" if older else f"sm_{architecture} is older"
        raise ConfigError(f"kernels need sm_{OLDEST} or newer, and {its}; try l4 or rtx 3090")
    short = {re.sub(r"\W|rtx", "", key): key for key in CARDS}
    if card_key := short.get(plain.replace("rtx", "")) or _matching(name):
        return measured(CARDS[card_key])
    known = {re.sub(r"\W", "", each): each for each in NAMES}
    close = [known[each] for each in difflib.get_close_matches(plain, known, cutoff=0.5)]
    cure = f"did you mean {', '.join(close)}" if close else f"choose from {', '.join(NAMES)}"
    raise ConfigError(f"no GPU is known as {name!r}; {cure}")


def measured(card: Card) -> Card:
    """Return a card with measured rates if a run has measured them."""
    return card._replace(**MEASURED.get(card.name, {}))


def _matching(name: str) -> str | None:
    """Return the key of the card with all relevant words of a name and the most words, or None."""
    words = _words(name)
    terms = {word for word in words if not re.fullmatch(SILENT, word)}
    matches = [key for key in CARDS if terms <= _words(key) <= words | {"rtx"}]
    return max(matches, key=lambda key: len(_words(key)), default=None)


def _words(name: str) -> set[str]:
    return {*re.findall(TOKENS, re.sub(r"(\d) *gb\b|(?<=\d{3})g\b", r"\1gb", name.lower()))}


def card_here(number: int) -> Card:
    """Return GPU ``number`` of this machine, with the rates of its card if the name is known.

    Rates are left out if the number of SMs differs from the card: a MIG slice or a laptop GPU has
    fewer.
    """
    gpu_name = gpu.cupy().cuda.runtime.getDeviceProperties(number)["name"].decode()
    limits, card_key = gpu.limits_of(number), _matching(gpu_name)
    same = card_key is not None and CARDS[card_key][1:3] == (limits.architecture, limits.processors)
    rates = measured(CARDS[str(card_key)])[3:] if same else ()
    return Card(gpu_name, limits.architecture, limits.processors, *rates)


def _checked(fields: dict[str, Any]) -> Card:
    """Return a card with these fields, or raise a ConfigError; missing rates are unknown."""
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
    values.setdefault("source", "as passed")
    return Card(**values)
