"""Control, memory, barriers, warps, tensor cores and copies: what the machine does."""

import re
from typing import TYPE_CHECKING

from .parse import UnknownError, operands
from .rules import BITS, RULES, SIZE, WIDTH, Ops, Rule, Words, flag, instruction, only

if TYPE_CHECKING:
    from .translate import Function

SCOPES = "cta cluster gpu sys"
SPACES = "global shared shared::cta shared::cluster local param const"
STRONG = "volatile relaxed acquire release mmio"
CACHES = "ca cg cs cv lu wb wt nc L1::no_allocate L1::evict_last L1::evict_first L2::128B L2::256B"
BARRIER = "shared::cta shared::cluster b64"
BULK = "shared::cta shared::cluster global"
RULES |= {
    # control
    "ret": Rule("", "return", "uni"),
    "trap": Rule("", 'fail("trap", {where})'),
    "setmaxnreg": Rule("#", "", "inc dec sync aligned u32"),
    "prefetch": Rule("#", "", "tensormap global L1 L2"),
    # addresses
    "cvta": Rule("d t", "{x}", "to global param local const"),
    "cvta.shared": Rule("d t", "(u64)near({x}, 0, {where})"),
    "cvta.to.shared": Rule("d t", "shared_address((const void *)u64({x}), {where})"),
    "mapa.u64": Rule("d l i", "(u64)cluster_map((const void *){x}, {y}, {at})"),
    "mapa.shared::cluster.u32": Rule("d u i", "map_shared({x}, {y}, {where})"),
    # barriers and fences
    "bar.sync": Rule("i i?", "barrier({x}, {y}, true, {line})"),
    "bar.arrive": Rule("i i", "barrier({x}, {y}, false, {line})"),
    "bar.warp.sync": Rule("u", "syncwarp({x}, {line})"),
    "bar.red.popc.u32": Rule("d # p", "u32(barrier_count({y}, {line}))"),
    "bar.red.or.pred": Rule("d # p", "barrier_count({y}, {line}) != 0"),
    "bar.red.and.pred": Rule("d # p", "barrier_count(!{y}, {line}) == 0"),
    "barrier.cluster.arrive": Rule("", "cluster_arrive(false, {line})", "aligned"),
    "barrier.cluster.arrive.relaxed": Rule("", "cluster_arrive(true, {line})", "aligned"),
    "barrier.cluster.wait": Rule("", "cluster_wait({line})", "aligned"),
    "membar": Rule("", "threadfence(true)", "gl sys"),
    "membar.cta": Rule("", "threadfence(false)"),
    "fence": Rule("", "threadfence(true)", f"sc acq_rel {SCOPES}"),
    "fence.cta": Rule("", "threadfence(false)", "sc acq_rel"),
    "fence.mbarrier_init": Rule("", "mbarrier_init_fence()", "release cluster"),
    "fence.proxy.async": Rule("", "fence_proxy_async()", BULK),
    "mbarrier.init": Rule("a8 i", "mbarrier_init({x}, {y}, {at})", BARRIER),
    "mbarrier.arrive": Rule("_ a8", "mbarrier_arrive({y}, 0, {at})", f"{BARRIER} release cluster"),
    "mbarrier.arrive.expect_tx": Rule("_ a8 i", "mbarrier_arrive({y}, {z}, {at})", BARRIER),
    "mbarrier.complete_tx": Rule(  # as many bytes as are expected have come
        "a8 i", "mbarrier_complete({x}, {y}, {at})", f"{BARRIER} relaxed cluster"
    ),
    "mbarrier.try_wait.parity": Rule(  # it waits until it is true
        "d a8 i", "(mbarrier_wait({x}, {y}, {at}), true)", f"{BARRIER} acquire cluster"
    ),
    # warps
    "vote.sync.ballot.b32": Rule("d p u", "ballot({y}, {x}, {line})"),
    "vote.sync.any.pred": Rule("d p u", "ballot({y}, {x}, {line}) != 0"),
    "vote.sync.all.pred": Rule("d p u", "ballot({y}, !{x}, {line}) == 0"),
    "wgmma.fence": Rule("", "wgmma_fence({at})", "sync aligned"),
    "wgmma.commit_group": Rule("", "wgmma_commit()", "sync aligned"),
    # copies
    "cp.async.commit_group": Rule("", "cp_async_commit()"),
    "cp.async.wait_group": Rule("#", "cp_async_wait({x}, {at})"),
    "cp.async.wait_all": Rule("", "cp_async_commit(); cp_async_wait(0, {at})"),
    "cp.async.bulk.commit_group": Rule("", "tma_store_commit()"),
    "cp.async.bulk.wait_group": Rule("#", "tma_store_wait({x})"),
    "cp.async.bulk.bulk_group": Rule("g a i", "bulk_store({x}, {y}, {z}, {at})", BULK),
    "cp.async.bulk.mbarrier::complete_tx::bytes": Rule(
        "a g i a8", "bulk_load({x}, {y}, {z}, {v}, {at})", BULK
    ),
    "st.async": Rule(
        "u u u",
        "store_async(own({x}, {where}), {y}, own({z}, {where}), rank_of({x}), {at})",
        "shared::cluster mbarrier::complete_tx::bytes b32 u32 s32 f32",
    ),
}
# The new value, of x that was there and v, w that were given.
ATOMICS = {
    "add": "x + v",
    "inc": "x >= v ? 0 : x + 1",
    "dec": "x == 0 || x > v ? v : x - 1",
    "exch": "v",
    "min": "x < v ? x : v",
    "max": "x > v ? x : v",
    "and": "x & v",
    "or": "x | v",
    "xor": "x ^ v",
    "cas": "x == v ? w : x",
}


@instruction("bra")
def bra(f: "Function", words: Words, ops: Ops) -> str:
    return f"goto {f.label(ops[0])};"


@instruction("call")
def call(f: "Function", words: Words, ops: Ops) -> str:
    """Results and arguments lie in variables of the space .param, in the order of the head."""
    (name,) = (op for op in ops if not op.startswith("("))
    given = [each for op in ops if op.startswith("(") for each in operands(op[1:-1])]
    cells = ", ".join(f"(void *){f.symbols[each][1]}" for each in given)
    return f"void *cells[] = {{{cells or 'nullptr'}}}; f_{name}(cells);"


# ---- memory -------------------------------------------------------------------------------------
def space_of(words: Words) -> str:
    """Return the space that is named, or nothing."""
    return next((word for word in words if word in SPACES.split()), "")


def accessed(f: "Function", words: Words, address: str, names: list[str]) -> tuple[str, str]:
    """Return what makes p point at checked bytes, one value a name, and the type of a value."""
    verb, *more, _ = words
    only(more, f"{STRONG} {SCOPES} {CACHES} {SPACES} v2 v4 v8")
    kind, space = WIDTH[words[-1]], space_of(words)
    count = next((int(word[1]) for word in more if re.fullmatch(r"v[248]", word)), 1)
    if len(names) != count:
        raise UnknownError(f"{len(names)} registers")
    kind = BITS[kind] if kind[0] == "f" else kind
    pointer = f.address(address, space, SIZE[kind] * count)
    if space != "param":
        write, strong = verb == "st", bool({*STRONG.split()} & {*more})
        given = f"{SIZE[kind] * count}, {flag(write)}, {flag(strong)}, {f.where()}"
        pointer = f"accessed({pointer}, {given})"
    return f"char *p = {pointer};", kind


@instruction("ld")
def ld(f: "Function", words: Words, ops: Ops) -> str:
    names = f.several(ops[0])
    code, kind = accessed(f, words, ops[1], names)
    reads = (f.to(name, f"get<{kind}>(p, {i})") for i, name in enumerate(names))
    return f"{code} {' '.join(reads)}{'threadfence(true);' * ('acquire' in words)}"


@instruction("st")
def st(f: "Function", words: Words, ops: Ops) -> str:
    values = f.several(ops[1])
    code, kind = accessed(f, words, ops[0], values)
    writes = (f"set<{kind}>(p, {i}, {f.value(v, kind)});" for i, v in enumerate(values))
    return f"{'threadfence(true); ' * ('release' in words)}{code} {' '.join(writes)}"


@instruction("atom", "red")
def atom(f: "Function", words: Words, ops: Ops) -> str:
    target, address, *rest = ops if words[0] == "atom" else ("_", *ops)
    _, *more, last = words
    (what,) = (word for word in more if word in ATOMICS)
    only(more, f"{what} relaxed acquire release acq_rel {SCOPES} {SPACES}")
    only([last], "b32 b64 u32 u64 s32 s64 f32 f64")
    kind = WIDTH[last]
    values = [f.value(o, kind) for o in rest]
    pointer = f.address(address, space_of(words), SIZE[kind])
    given = ", ".join(f"{n} = {v}" for n, v in zip("vw", values, strict=False))
    new = f"[&]({kind} x) {{ return {kind}({ATOMICS[what]}); }}"
    fence = f"threadfence({flag('cta' not in words)});"
    before = fence * bool({"release", "acq_rel"} & {*words})
    after = fence * bool({"acquire", "acq_rel"} & {*words})
    code = f.to(target, f"atomic<{kind}>({pointer}, {f.where()}, {new})", kind)
    return f"{before} {kind} {given}; {code} {after}"


# ---- warps and tensor cores ---------------------------------------------------------------------
TYPES = {"bf16": "0", "f16": "1", "tf32": "2", "s8": "3", "e4m3": "4", "e5m2": "5"}
SHAPES = {"bf16": "m16n8k16", "f16": "m16n8k16", "tf32": "m16n8k8"}  # others m16n8k32


def _list(f: "Function", names: list[str], kind: str) -> str:
    return ", ".join(f.value(name, kind) for name in names)


def _results(f: "Function", names: list[str]) -> str:
    return " ".join(f.to(name, f"D[{i}]") for i, name in enumerate(names))


@instruction("shfl")
def shfl(f: "Function", words: Words, ops: Ops) -> str:
    only(words[1:], "sync up down bfly idx b32")
    (target, _, p), given = ops[0].partition("|"), _list(f, [*ops[1:]], "u32")
    found = f.register(p)
    lanes = f"'{words[2][0]}', {given}, {f'&{found[0]}' if found else 'nullptr'}"
    return f.to(target, f"shuffle({lanes}, {f.where(collective=True)})")


@instruction("mma")
def mma(f: "Function", words: Words, ops: Ops) -> str:
    kind, sums = words[-2], "s32" if words[-2] == "s8" else "f32"
    shape = (SHAPES.get(kind, "m16n8k32"), "row", "col", sums, kind, kind, sums)
    d, a, b, c = (f.several(o) for o in ops)
    if words != ("mma", "sync", "aligned", *shape) or [*map(len, (d, a, b, c))] != [4, 4, 2, 4]:
        raise UnknownError("shape or dtypes of mma")
    lists = (f"{n}[] = {{{_list(f, o, 'u32')}}}" for n, o in zip("ABC", (a, b, c), strict=True))
    called = f"mma({TYPES[kind]}, D, A, B, C, {f.at()});"
    return f"u32 {', '.join(lists)}, D[4]; {called} {_results(f, d)}"


@instruction("ldmatrix")
def ldmatrix(f: "Function", words: Words, ops: Ops) -> str:
    only(words[1:], "sync aligned m8n8 x1 x2 x4 trans shared shared::cta b16")
    names = f.several(ops[0])
    only([f"x{len(names)}"], " ".join(words))
    # the machine checks the alignment of rows; an address beyond the window is nobody's
    given = [f"{len(names)}", flag("trans" in words), "D", f.address(ops[1], "shared", 16)]
    called = f"ldmatrix({', '.join(given)}, {f.at()});"
    return f"u32 D[{len(names)}]; {called} {_results(f, names)}"


@instruction("wgmma.mma_async")
def wgmma(f: "Function", words: Words, ops: Ops) -> str:
    kind, shape = words[-1], re.fullmatch(r"m64n(\d+)k(\d+)", words[4])
    steps = "16" if kind in ("bf16", "f16") else "32"
    if shape is None or words[5:] != ("f32", kind, kind) or shape[2] != steps:
        raise UnknownError("shape or dtypes of wgmma")
    names, held = f.several(ops[0]), ops[1].startswith("{")
    a, b, scale, *rest = ops[1:]
    if len(names) * 2 != int(shape[1]) or rest[:2] != ["1", "1"]:
        raise UnknownError("accumulators or signs of wgmma")
    turns = ["0", *rest[2:3], "0"][:2] if held else [*rest[2:4], "0", "0"][:2]
    own = ", ".join(f"&{found[0]}" for n in names if (found := f.register(n)))
    registers = f"u32 A[] = {{{_list(f, f.several(a), 'u32')}}}; " if held else ""
    source = "A, 0" if held else f"nullptr, {f.value(a, 'u64')}"
    given = [shape[1], TYPES[kind], "sum", source, f.value(b, "u64"), f.value(scale, "bool")]
    opened = f"u32 *const D[] = {{{own}}}; float *sum = products.open(D, {f.where()});"
    called = f"wgmma({', '.join([*given, *turns])}, {f.at()});"
    return f"{opened} {registers}{called} products.leave(D, sum);"


@instruction("wgmma.wait_group")
def wait_group(f: "Function", words: Words, ops: Ops) -> str:
    land = "products.land(sums);" if f.poison else ""
    return f"wgmma_wait({ops[0]}, {f.at()}); {land}"


# ---- copies -------------------------------------------------------------------------------------
@instruction("cp.async.ca", "cp.async.cg")
def cp_async(f: "Function", words: Words, ops: Ops) -> str:
    only(words[3:], "shared shared::cta global L2::64B L2::128B L2::256B")
    read = f.value(ops[3], "s32") if len(ops) > 3 else ops[2]
    ends = f"{f.address(ops[0], 'shared', int(ops[2]))}, {f.address(ops[1], 'global')}"
    return f"cp_async({ends}, {ops[2]}, at_most({read}, {ops[2]}, {f.where()}), {f.at()});"


@instruction("cp.async.bulk.tensor", "cp.reduce.async.bulk.tensor")
def tensor(f: "Function", words: Words, ops: Ops) -> str:
    """Copy a box of an array that a descriptor describes."""
    known = "cp reduce async bulk tensor tile bulk_group add mbarrier::complete_tx::bytes"
    only(words, f"{known} multicast::cluster 1d 2d 3d 4d 5d {BULK}")
    out = "bulk_group" in words
    name, _, where = ops[1 - out].strip("[]").partition(",")
    coordinates = f.several(where.strip())
    count = len(coordinates)
    if f"{count}d" not in words:
        raise UnknownError(f"{count} coordinates")
    code = f"const int c[] = {{{_list(f, coordinates, 's32')}}};"
    far, here = f"(void *){f.value(name.strip(), 'u64')}", f.address(ops[out], "shared")
    if out:
        adds = flag("reduce" in words)
        return f"{code} tma_store({count}, {far}, {here}, c, {adds}, {f.at()});"
    ranks = f"u32({f.value(ops[3], 'u16')})" if len(ops) > 3 else "1u << M.cur->rank"
    bar = f.address(ops[2], "shared", 8)
    return f"{code} tma_load_multicast({count}, {here}, {far}, {bar}, c, {ranks}, {f.at()});"
