"""A launch for each primitive of the kernels, with the result expected from plain arithmetic.

It needs only NumPy.  Values are small integers, so that sums are exact in any order and the results
of a GPU, the emulator and plain arithmetic must be equal bit by bit.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


class Tile(NamedTuple):
    """An array that a kernel accesses by a TMA descriptor; box starts with the innermost axis."""

    array: np.ndarray
    box: tuple[int, ...]
    swizzle: int = 128
    number: str = ""  # the dtype, if NumPy does not have it and the array has its bits


class Launch(NamedTuple):
    """A launch of a kernel of emulator/kernels; ``expected`` is by position of argument."""

    file: str
    kernel: str
    grid: int
    block: int
    args: tuple[Any, ...]
    expected: dict[int, np.ndarray]
    shared: int = 0


PRIMITIVES: dict[str, tuple[int, Callable[[np.random.Generator], Launch]]] = {}
Make = Callable[..., Launch]


def primitive(capability: int, *args: Any, name: str = "") -> Callable[[Make], Make]:
    """Register a function that creates a launch, for GPUs of at least this compute capability."""

    def add(make: Make) -> Make:
        PRIMITIVES[name or make.__name__] = (capability, lambda rng: make(rng, *args))
        return make

    return add


def runs_on(name: str, capability: int) -> bool:
    """Return whether GPUs of a compute capability have a primitive; only Hopper has wgmma."""
    hopper = name.startswith(("wgmma", "multicast"))
    return capability == 90 if hopper else capability >= PRIMITIVES[name][0]


def launch(name: str) -> Launch:
    """Return the launch of a primitive; the same on every call."""
    return PRIMITIVES[name][1](np.random.default_rng(list(name.encode())))


def bfloat16(values: np.ndarray) -> np.ndarray:
    """Return the bits of values that bfloat16 represents exactly."""
    bits = values.astype(np.float32).view(np.uint32)
    assert not (bits & 0xFFFF).any()
    return (bits >> 16).astype(np.uint16)


# ---- products ---------------------------------------------------------------------------------
def fragments(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each lane's fragments of A (16 x inner) and B (inner x 8), packed in words."""
    each = 4 // a.itemsize  # values in a word
    lane = np.arange(32)
    row, first = lane // 4, lane % 4 * each
    x, y = np.zeros((32, 4, each), a.dtype), np.zeros((32, 2, each), b.dtype)
    for i in range(each):
        for r in range(4):
            x[:, r, i] = a[row + r % 2 * 8, first + r // 2 * 4 * each + i]
        for r in range(2):
            y[:, r, i] = b[first + r * 4 * each + i, row]
    return x.view(np.uint32)[..., 0], y.view(np.uint32)[..., 0]


def mma(rng: np.random.Generator, kernel: str, inner: int, encode: Any, out: Any) -> Launch:
    most = 128 if out is np.int32 else 8
    a, b = (rng.integers(-most, most, shape) for shape in ((16, inner), (inner, 8)))
    c = rng.integers(-9, 9, (16, 8))
    lane, r = np.arange(32)[:, None], np.arange(4)
    cells = lane // 4 + r // 2 * 8, lane % 4 * 2 + r % 2
    args = (*fragments(encode(a), encode(b)), c[cells].astype(out), np.zeros((32, 4), out))
    return Launch("products.cu", kernel, 1, 32, args, {3: (c + a @ b)[cells].astype(out)})


primitive(80, "m16n8k16_f16", 16, np.float16, np.float32, name="mma f16")(mma)
primitive(80, "m16n8k16_bf16", 16, bfloat16, np.float32, name="mma bf16")(mma)
primitive(80, "m16n8k8_tf32", 8, np.float32, np.float32, name="mma tf32")(mma)
primitive(80, "m16n8k32_s8", 32, np.int8, np.int32, name="mma s8")(mma)


@primitive(80, name="mma tf32 ignores 13 bits")
def mma_tf32_bits(rng: np.random.Generator) -> Launch:
    product = mma(rng, "m16n8k8_tf32", 8, np.float32, np.float32)
    a, b, c, out = product.args
    noise = rng.integers(0, 1 << 13, a.shape).astype(np.uint32)
    return product._replace(args=(a | noise, b, c, out))


@primitive(80)
def dp4a(rng: np.random.Generator) -> Launch:
    a, b = (rng.integers(-128, 128, (32, 4)).astype(np.int8) for _ in range(2))
    c = rng.integers(-1000, 1000, 32).astype(np.int32)
    expected = c + (a.astype(np.int32) * b).sum(1, dtype=np.int32)
    words = (array.view(np.int32)[:, 0] for array in (a, b))
    return Launch("products.cu", "dot_bytes", 1, 32, (*words, c, np.zeros_like(c)), {3: expected})


@primitive(80)
def round_tf32(rng: np.random.Generator) -> Launch:
    x = rng.standard_normal(32).astype(np.float32)
    x[:4] = 1 + 2.0**-11, -1 - 2.0**-11, 1 + 3 * 2.0**-11, 0  # ties, away from zero
    kept = np.float64(2.0) ** (np.frexp(x.astype(np.float64))[1] - 11)
    rounded = np.copysign(np.floor(np.abs(x) / kept + 0.5) * kept, x).astype(np.float32)
    out = np.zeros(32, np.uint32)
    return Launch("products.cu", "tf32_rounding", 1, 32, (x, out), {1: rounded.view(np.uint32)})


def fp8_values(mantissa: int, bias: int, finite_top: bool) -> np.ndarray:
    """Return the value of each of the 256 codes, by the definition of the format."""
    code = np.arange(256)
    exponent, fraction = code >> mantissa & (127 >> mantissa), code & ((1 << mantissa) - 1)
    size = ((exponent > 0) + fraction / 2.0**mantissa) * 2.0 ** (np.maximum(exponent, 1) - bias)
    if finite_top:
        size[[127, 255]] = np.nan
    else:
        top = exponent == 127 >> mantissa
        size[top] = np.where(fraction[top] > 0, np.nan, np.inf)
    return np.where(code & 128, -size, size)


E4M3, E5M2 = fp8_values(3, 7, True), fp8_values(2, 15, False)


def nearest_code(table: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return the code of the nearest finite value, ties to the even code."""
    positive = table[:128][np.isfinite(table[:128])].astype(np.float64)
    size, between = np.abs(x.astype(np.float64)), (positive[1:] + positive[:-1]) / 2
    code = np.searchsorted(between, size)  # the lower one of a tie
    code += (code % 2 == 1) & (size == np.append(between, np.nan)[code])
    return np.where(np.isnan(x), 127, code + 128 * np.signbit(x)).astype(np.uint32)


def fp8(table: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function that converts values, which the format has exactly, to their codes."""

    def encode(values: np.ndarray) -> np.ndarray:
        codes = nearest_code(table, values.astype(np.float32).reshape(-1)).astype(np.uint8)
        assert (table[codes] == values.reshape(-1)).all()
        return codes.reshape(values.shape)

    return encode


primitive(89, "m16n8k32_e4m3", 32, fp8(E4M3), np.float32, name="mma e4m3")(mma)
primitive(89, "m16n8k32_e5m2", 32, fp8(E5M2), np.float32, name="mma e5m2")(mma)


@primitive(89)
def fp8_pack(rng: np.random.Generator) -> Launch:
    x = (rng.standard_normal(128) * 2.0 ** rng.integers(-20, 20, 128)).astype(np.float32)
    ends = [0, -0.0, 448, 460, 464, 465, 1e6, -1e6, 57344, 61440, 1e9, -1e9, np.nan, -np.nan]
    ties = [E4M3[i : i + 2].mean() for i in (0, 1, 2, 8, 9, 30, 31, 120, 121)]
    ties += [E5M2[i : i + 2].mean() for i in (0, 1, 2, 4, 5, 60, 61, 119, 120)]
    x[:32] = ends + ties
    codes = [nearest_code(table, np.clip(x, -1e9, 1e9)) for table in (E4M3, E5M2)]
    pairs = [code[0::2] | code[1::2] << np.uint32(8) for code in codes]
    out = np.zeros((64, 2), np.uint32)
    return Launch("products.cu", "fp8_pack", 1, 64, (x, out), {1: np.stack(pairs, 1)})


@primitive(89)
def fp8_unpack(rng: np.random.Generator) -> Launch:
    codes = rng.permutation(256).astype(np.uint8)
    codes = codes[~np.isnan(E4M3[codes]) & ~np.isnan(E5M2[codes])]  # NaN has no specified bits
    codes = np.resize(codes, 256)
    halves = [table[codes].astype(np.float16).view(np.uint32) for table in (E4M3, E5M2)]
    args = (codes.view(np.uint16), np.zeros((128, 2), np.uint32))
    return Launch("products.cu", "fp8_unpack", 1, 128, args, {1: np.stack(halves, 1)})


def wgmma(
    rng: np.random.Generator, n: int, ta: int, tb: int, registers: bool, first: int = 0
) -> Launch:
    a, b = rng.integers(-9, 9, (64, 64)), rng.integers(-9, 9, (first + n, 64))
    encode = np.float16 if registers else bfloat16
    x, y = (np.ascontiguousarray(encode(m.T if t else m)) for m, t in ((a, ta), (b, tb)))
    number = "float16" if registers else "bfloat16"
    tiles = Tile(x, (64, 64), 128, number), Tile(y, (64, 64 if tb else 32), 128, number)
    parts = [
        fragments(a[i : i + 16, k : k + 16].astype(np.float16), np.zeros((16, 8), np.float16))[0]
        for i in range(0, 64, 16)
        for k in range(0, 64, 16)
    ]
    words = np.stack(parts).reshape(4, 4, 32, 4).transpose(0, 2, 1, 3).copy()
    args = (*tiles, words, np.zeros((64, n), np.float32))
    name = f"wgmma<{n}, {ta}, {tb}, {str(registers).lower()}, 0, {first}>"
    expected = {3: (a @ b[first:].T).astype(np.float32)}
    return Launch("products.cu", name, 1, 128, args, expected, 8192 + -(-(first + n) // 64) * 8192)


for n in (32, 64, 96, 128, 160, 192, 224, 256):
    primitive(90, n, 0, 0, False, name=f"wgmma n{n}")(wgmma)
    primitive(90, n, 0, n // 32 % 2, True, name=f"wgmma n{n} A from registers")(wgmma)
for ta, tb in ((0, 1), (1, 0), (1, 1)):
    primitive(90, 64, ta, tb, False, name=f"wgmma n64, majors {ta}{tb}")(wgmma)
primitive(90, 32, 1, 1, False, name="wgmma n32, majors 11")(wgmma)
primitive(90, 192, 1, 1, False, name="wgmma n192, majors 11")(wgmma)
primitive(90, 32, 1, 1, False, 32, name="wgmma n32, majors 11, the right half of a panel")(wgmma)


def wgmma_fp8(rng: np.random.Generator, n: int, number: int, registers: bool) -> Launch:
    a, b = rng.integers(-8, 8, (64, 128)), rng.integers(-8, 8, (n, 128))
    encode = fp8((E4M3, E5M2)[number - 1])
    x, y = encode(a), encode(b)
    none = np.zeros((32, 8), np.uint8)
    parts = [
        fragments(x[i : i + 16, k : k + 32], none)[0]
        for i in range(0, 64, 16)
        for k in range(0, 128, 32)
    ]
    words = np.stack(parts).reshape(4, 4, 32, 4).transpose(0, 2, 1, 3).copy()
    args = (Tile(x, (128, 64)), Tile(y, (128, 32)), words, np.zeros((64, n), np.float32))
    name = f"wgmma<{n}, 0, 0, {str(registers).lower()}, {number}>"
    expected = {3: (a @ b.T).astype(np.float32)}
    return Launch("products.cu", name, 1, 128, args, expected, 8192 + -(-n // 64) * 8192)


for n in (32, 64, 96, 128, 160, 192, 224, 256):
    primitive(90, n, 1, n // 32 % 2 == 1, name=f"wgmma e4m3 n{n}")(wgmma_fp8)
    primitive(90, n, 2, n // 32 % 2 == 0, name=f"wgmma e5m2 n{n}")(wgmma_fp8)
primitive(90, 64, 1, True, name="wgmma e4m3 n64 A from registers")(wgmma_fp8)


# ---- copies -----------------------------------------------------------------------------------
@primitive(90, name="cp.async.bulk")
def bulk(rng: np.random.Generator) -> Launch:
    words = rng.integers(0, 1 << 32, 256, np.uint32)
    args = (words, np.zeros_like(words))
    return Launch("cluster.cu", "bulk", 1, 64, args, {1: words[::-1].copy()})


def reduce_add(rng: np.random.Generator, kernel: str, number: str, encode: Any) -> Launch:
    start, added = rng.integers(-9, 9, (10, 32)), rng.integers(-9, 9, (3, 8, 16))
    total = start.copy()
    total[4:10, 16:32] += added.sum(0)[:6]  # two rows are beyond the edge
    sums, parts = encode(start), encode(added)
    args = (Tile(sums, (16, 8), 0, number), parts)
    return Launch("cluster.cu", kernel, 3, 128, args, {0: encode(total)})


for number, encode in (("float", np.float32), ("int", np.int32), ("bfloat16", bfloat16)):
    dtype = {"float": "float32", "int": "int32"}.get(number, number)
    primitive(90, f"reduce_{number}", dtype, encode, name=f"TMA reduce-add {dtype}")(reduce_add)


@primitive(90, name="sums in turns")
def in_turns(rng: np.random.Generator) -> Launch:
    start, added = rng.integers(-9, 9, 128), rng.integers(-9, 9, (4, 128))
    args = (start.astype(np.float32), added.astype(np.float32), np.zeros(2, np.int32))
    expected = {0: (start + added.sum(0)).astype(np.float32), 2: np.full(2, 4, np.int32)}
    return Launch("cluster.cu", "in_turns", 4, 128, args, expected)


# ---- clusters ---------------------------------------------------------------------------------
def exchange(rng: np.random.Generator, size: int) -> Launch:
    words = rng.integers(0, 1 << 31, (8, 32)).astype(np.int32)
    block = np.arange(8)
    rank, first = block % size, block // size * size
    neighbour = words[first + (rank + 1) % size]
    written = 100 * ((rank - 1) % size)[:, None] + np.arange(32)
    expected = np.concatenate([neighbour, written.astype(np.int32)], 1)
    args = (words, np.zeros((8, 64), np.int32))
    return Launch("cluster.cu", f"exchange{size}", 8, 32, args, {1: expected})


primitive(90, 2, name="distributed shared memory, cluster of 2")(exchange)
primitive(90, 4, name="distributed shared memory, cluster of 4")(exchange)


@primitive(90, name="st.async and arrivals of other blocks")
def signals(_: np.random.Generator) -> Launch:
    sent = np.tile(10 * np.arange(4) + np.arange(4)[:, None], (2, 1)).astype(np.int32)
    noted = np.tile(3 * np.arange(128), (2, 1)).astype(np.int32)
    args = tuple(np.zeros_like(array) for array in (sent, noted))
    return Launch("cluster.cu", "signals", 8, 32, args, {0: sent, 1: noted})


@primitive(90, name="multicast TMA")
def multicast(rng: np.random.Generator) -> Launch:
    words = rng.integers(0, 1 << 31, (16, 64)).astype(np.int32)
    expected = np.stack([words[:, 16:32].reshape(-1)] * 2)
    args = (Tile(words, (16, 8), 0), np.zeros((2, 256), np.int32))
    return Launch("cluster.cu", "multicast", 2, 64, args, {1: expected})


# ---- warps and blocks -------------------------------------------------------------------------
@primitive(80)
def ldmatrix(_: np.random.Generator) -> Launch:
    tiles = np.arange(256, dtype=np.uint16).reshape(4, 8, 8)
    lane = np.arange(32)
    i, j = lane // 4, lane % 4 * 2
    plain = np.stack([tiles[:, i, j + h] for h in range(2)], -1)  # tile, lane, half
    turned = np.stack([tiles[:, j + h, i] for h in range(2)], -1)
    halves = np.concatenate([plain, turned]).swapaxes(0, 1)
    expected = np.ascontiguousarray(halves).view(np.uint32)[..., 0]
    args = (tiles.view(np.uint32), np.zeros((32, 8), np.uint32))
    return Launch("primitives.cu", "ldmatrix_both", 1, 32, args, {1: expected})


@primitive(80)
def ldmatrix_x2(_: np.random.Generator) -> Launch:
    tiles = np.arange(1000, 1128, dtype=np.uint16).reshape(2, 8, 8)
    lane = np.arange(32)
    i, j = lane // 4, lane % 4 * 2
    halves = np.stack([tiles[:, i, j + h] for h in range(2)], -1).swapaxes(0, 1)
    expected = np.ascontiguousarray(halves).view(np.uint32)[..., 0]
    args = (tiles.view(np.uint32), np.zeros((32, 2), np.uint32))
    return Launch("primitives.cu", "ldmatrix_two", 1, 32, args, {1: expected})


@primitive(80, name="cp.async")
def cp_async(rng: np.random.Generator) -> Launch:
    words = rng.integers(0, 1 << 31, (32, 4)).astype(np.int32)
    expected = np.where(np.arange(32)[:, None] % 3 > 0, words, 0).astype(np.int32)[::-1].copy()
    args = (words, np.zeros_like(words))
    return Launch("primitives.cu", "async_copies", 1, 32, args, {1: expected})


@primitive(80, name="named barriers")
def named_barriers(rng: np.random.Generator) -> Launch:
    x = rng.standard_normal((6, 32)).astype(np.float32)
    args = (x, np.zeros_like(x), np.int32(6))
    return Launch("primitives.cu", "named", 1, 128, args, {1: x[:, ::-1].copy()})


@primitive(90, name="mbarrier phases")
def mbarrier_phases(rng: np.random.Generator) -> Launch:
    x = rng.integers(0, 100, (5, 32)).astype(np.int32)
    args = (x, np.zeros_like(x), np.int32(5))
    return Launch("primitives.cu", "handed_over", 1, 64, args, {1: x[:, ::-1].copy()})


@primitive(90, name="mbarrier phases of bulk copies")
def mbarrier_copies(rng: np.random.Generator) -> Launch:
    words = rng.integers(0, 1 << 32, (5, 32), np.uint32)
    args = (words, np.zeros_like(words), np.int32(5))
    return Launch("cluster.cu", "refilled", 1, 64, args, {1: words[:, ::-1].copy()})


@primitive(80, name="votes of a block")
def block_votes(rng: np.random.Generator) -> Launch:
    x = rng.integers(0, 9, 64).astype(np.int32)
    votes = [[(x > 3).sum()], [0], [1]]
    expected = np.repeat(np.array(votes, np.int32), 64, axis=1)
    args = (x, np.zeros_like(expected))
    return Launch("primitives.cu", "block_votes", 1, 64, args, {1: expected})


@primitive(80, name="shuffles and votes")
def warp_moves(rng: np.random.Generator) -> Launch:
    v = rng.integers(0, 100, 32).astype(np.int32)
    lane = np.arange(32)
    up, down = np.maximum(lane - 2, 0), lane + 7
    up[:2] = lane[:2]  # off the end: one's own
    down = np.where(down % 16 < 7, lane, down)
    votes = np.uint32(sum(1 << i for i in range(32) if v[i] % 3 == 0)).view(np.int32)
    moved = [np.full(32, v[5]), v[lane ^ 3], v[up], v[down], np.full(32, votes), np.ones(32)]
    expected = np.stack(moved).astype(np.int32)
    return Launch("primitives.cu", "warp_moves", 1, 32, (v, np.zeros_like(expected)), {1: expected})


@primitive(80, name="Philox4x32-10")
def philox(_: np.random.Generator) -> Launch:
    """The known answers of Random123, the authors' own library."""
    counters, words = np.zeros((2, 32, 4), np.uint32)
    keys = np.zeros((32, 2), np.uint32)
    counters[1], keys[1] = 0xFFFFFFFF, 0xFFFFFFFF
    counters[2] = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]
    keys[2] = [0xA4093822, 0x299F31D0]
    words[:] = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    words[1] = [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    words[2] = [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]
    args = (counters, keys, np.zeros_like(words))
    return Launch("primitives.cu", "random_words", 1, 32, args, {2: words})


@primitive(80)
def atomics(_: np.random.Generator) -> Launch:
    cells, total = np.zeros(10, np.int32), np.zeros(1, np.float32)
    cells[4] = 0x7FFFFFFF
    left = [64, 63, -63, 255, 0x7FFF0000, 0, -128, 64 % 10, 7, 64]
    expected = {0: np.array(left, np.int32), 1: np.array([32], np.float32)}
    return Launch("primitives.cu", "atomics", 1, 64, (cells, total), expected)


@primitive(80, name="the last of several blocks")
def last_block(rng: np.random.Generator) -> Launch:
    words = rng.integers(-99, 99, (5, 64)).astype(np.int32)
    out = np.zeros(64, np.int32)
    args = (words, np.zeros_like(words), np.zeros(1, np.uint32), out)
    expected = {1: 2 * words, 2: np.array([5], np.uint32), 3: 2 * words.sum(0, dtype=np.int32)}
    return Launch("primitives.cu", "last_block", 5, 64, args, expected)


@primitive(80, name="float16 and bfloat16")
def roundings(rng: np.random.Generator) -> Launch:
    x = (rng.standard_normal(64) * 2.0 ** rng.integers(-20, 15, 64)).astype(np.float32)
    ties = [1 + 2.0**-11, 1 + 3 * 2.0**-11, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 3 * 2.0**-25, 2.0**-25]
    x[:12] = [*ties, 0, -0.0, 65519, 65520, np.inf, -np.inf]
    bits = x.view(np.uint32)
    brain = ((bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    with np.errstate(over="ignore"):
        half = x.astype(np.float16)
    narrow = np.stack([half.view(np.uint16), brain], 1)
    back = (brain.astype(np.uint32) << np.uint32(16)).view(np.float32)
    wide = np.stack([half.astype(np.float32), back], 1)
    args = (x, np.zeros_like(narrow), np.zeros_like(wide))
    return Launch("primitives.cu", "roundings", 1, 64, args, {1: narrow, 2: wide})


@primitive(80)
def integers(rng: np.random.Generator) -> Launch:
    pairs = rng.integers(0, 1 << 32, (32, 2), np.uint32)
    pairs[:3, 0] = 0, 1, 0x80000000
    pairs[:, 0] >>= rng.integers(0, 32, 32).astype(np.uint32)
    a, b = pairs.T.astype(np.int64)
    bits = np.array([f"{i:032b}" for i in a])
    ones = np.char.count(bits, "1")
    leading = np.char.find(bits, "1")
    lowest = 32 - np.char.rfind(bits, "1")
    bytewise = pairs.view(np.uint8).reshape(32, 2, 4).astype(np.int64)
    columns = [
        ones,
        np.where(a, leading, 32),
        np.where(a, lowest, 0),
        [int(x) * int(y) >> 32 for x, y in pairs],
        5 + (bytewise[:, 0] * bytewise[:, 1]).sum(1),
        np.rint((pairs[:, 0] >> 8).astype(np.float32) / 2),
        np.minimum(a, b),
        pairs.view(np.int32).max(1).view(np.uint32),
    ]
    expected = np.stack([np.asarray(column, np.int64) for column in columns], 1).astype(np.uint32)
    args = (pairs, np.zeros_like(expected))
    return Launch("primitives.cu", "integers", 1, 32, args, {1: expected})


# ---- TMA --------------------------------------------------------------------------------------
def swizzle(tile: np.ndarray, span: int) -> np.ndarray:
    """Return a tile of 16-bit values in its order in shared memory under a swizzle."""
    linear = np.arange(tile.size) * 2
    mask = {0: 0, 32: 0x10, 64: 0x30, 128: 0x70}[span]
    lying = np.zeros(tile.size, np.uint16)
    lying[(linear ^ ((linear >> 3) & mask)) // 2] = tile.reshape(-1)
    return lying


def tma_load(rng: np.random.Generator, rank: int, span: int) -> Launch:
    inner = (span or 128) // 2
    box = {2: (inner, 16), 3: (inner, 8, 2), 4: (inner, 4, 3, 2)}[rank]
    corner = {2: (8, 9), 3: (-8, 16, 4), 4: (64, -2, 3, 2)}[rank]
    whole = rng.integers(0, 65536, (3, 5, 20, 96)).astype(np.uint16)
    array = np.ascontiguousarray(whole[(0,) * (4 - rank)])
    tile = np.zeros(box[::-1], np.uint16)
    for index in np.ndindex(*tile.shape):
        at = tuple(np.add(index, corner[::-1]))
        if all(0 <= i < n for i, n in zip(at, array.shape, strict=True)):
            tile[index] = array[at]
    out = np.zeros(tile.nbytes, np.uint8)
    args = (Tile(array, box, span), out, np.int32(out.size), *map(np.int32, corner))
    expected = {1: swizzle(tile, span).view(np.uint8)}
    return Launch("primitives.cu", f"tma{rank}", 1, 64, args, expected, out.size)


for rank in (2, 3, 4):
    for span in (0, 32, 64, 128):
        primitive(90, rank, span, name=f"TMA load {rank}d, swizzle {span}")(tma_load)


@primitive(90, name="TMA store 2d")
def tma_store(rng: np.random.Generator) -> Launch:
    words = rng.integers(0, 1 << 31, (8, 16)).astype(np.int32)
    expected = np.zeros((10, 32), np.int32)
    expected[4:10, 16:32] = words[:6]  # two rows are beyond the edge
    args = (Tile(np.zeros((10, 32), np.int32), (16, 8), 0), words)
    return Launch("cluster.cu", "store_tile", 1, 128, args, {0: expected})
