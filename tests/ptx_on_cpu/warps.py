"""Barriers, warps, tensor cores and copies: what the machine does for many threads together."""

import re
from typing import TYPE_CHECKING

from .instructions import flag, instruction, only
from .parse import UnknownError

if TYPE_CHECKING:
    from .translate import Function

TYPES = {"bf16": "0", "f16": "1", "tf32": "2", "s8": "3", "e4m3": "4", "e5m2": "5"}
INTO = "shared::cta shared::cluster mbarrier::complete_tx::bytes"
SHAPES = {"bf16": "m16n8k16", "f16": "m16n8k16", "tf32": "m16n8k8"}  # others m16n8k32


@instruction("bar", "barrier")
def bar(f: "Function", words: list[str], ops: list[str]) -> str:
    words = [word for word in words if word not in ("cta", "aligned")]
    if words[0] == "warp":
        return f"{f.call('syncwarp', f.value(ops[0], 'u32'), collective=True)};"
    if words[0] == "cluster":
        only(words[1:], "arrive wait relaxed release acquire")
        relaxed = [flag("relaxed" in words)] if words[1] == "arrive" else []
        return f"{f.call(f'cluster_{words[1]}', *relaxed, collective=True)};"
    if words[0] == "red":
        if ops[1] not in ("0", "0x0") or len(ops) != 3:
            raise UnknownError("named or partial reduction")
        p, kind = f.value(ops[-1], "bool"), words[1]
        votes = f.call("barrier_count", f"{'!' if kind == 'and' else ''}{p}", collective=True)
        counts = {"popc": f"u32({votes})", "or": f"{votes} != 0", "and": f"{votes} == 0"}
        return f.to(ops[0], counts[kind])
    only(words, "sync arrive")
    number, count = f.value(ops[0], "s32"), f.value(ops[1], "s32") if len(ops) > 1 else "0"
    return f"{f.call('barrier', number, count, flag('sync' in words), collective=True)};"


@instruction("shfl")
def shfl(f: "Function", words: list[str], ops: list[str]) -> str:
    only(words, "sync up down bfly idx b32")
    (target, _, p), rest = ops[0].partition("|"), [f.value(o, "u32") for o in ops[1:]]
    found = f.register(p)
    lanes = f"'{words[1][0]}', {', '.join(rest)}, {f'&{found[0]}' if found else 'nullptr'}"
    return f.to(target, f"shuffle({lanes}, {f.at(collective=True)})")


@instruction("vote")
def vote(f: "Function", words: list[str], ops: list[str]) -> str:
    only(words, "sync ballot any all b32 pred")
    mask, p = f.value(ops[2], "u32"), f.value(ops[1], "bool")
    code = f.call("ballot", mask, f"{'!' if 'all' in words else ''}{p}", collective=True)
    return f.to(ops[0], code + {"ballot": "", "any": " != 0", "all": " == 0"}[words[1]])


@instruction("elect")
def elect(f: "Function", words: list[str], ops: list[str]) -> str:
    target, _, p = ops[0].partition("|")
    code = f"u32 lanes = {f.call('ballot', f.value(ops[1], 'u32'), 'true', collective=True)}; "
    first = "__builtin_ctz(lanes)"
    return code + f.to(target, first) + f.to(p, f"{first} == lane_id()")


@instruction("redux")
def redux(f: "Function", words: list[str], ops: list[str]) -> str:
    sums = {"add": "x + y", "and": "x & y", "or": "x | y", "xor": "x ^ y"}
    sums |= {"min": "x < y ? x : y", "max": "x > y ? x : y"}
    kind = {"s32": "s32"}.get(words[-1], "u32")
    only(words, f"sync {words[1]} u32 s32 b32")
    given = f"{f.value(ops[1], kind)}, {f.value(ops[2], 'u32')}, {f.at(collective=True)}"
    return f.to(
        ops[0], f"reduced<{kind}>({given}, [](auto x, auto y) {{ return {sums[words[1]]}; }})"
    )


@instruction("activemask")
def activemask(f: "Function", words: list[str], ops: list[str]) -> str:
    return f.to(ops[0], "active_lanes()")


# ---- tensor cores -------------------------------------------------------------------------------
@instruction("mma")
def mma(f: "Function", words: list[str], ops: list[str]) -> str:
    kind, sums = words[-3], {"f32": "f32", "s32": "u32"}[words[-1]]
    only(words, f"sync aligned row col {SHAPES.get(kind, 'm16n8k32')} {kind} {words[-1]}")
    d, a, b, c = (f.several(o) for o in ops)
    if (
        not {"row", "col"} <= {*words}
        or words[-2] != kind
        or (len(d), len(a), len(b)) != (4, 4, 2)
        or kind not in TYPES
    ):
        raise UnknownError("shape or dtypes of mma")
    given = (f"u32 {name}[] = {{{_list(f, o, 'u32')}}};" for name, o in (("A", a), ("B", b)))
    code = f"{' '.join(given)} {sums} C[] = {{{_list(f, c, sums)}}}, D[4]; "
    return f"{code}{f.call('mma', TYPES[kind], 'D', 'A', 'B', 'C')}; {_results(f, d)}"


@instruction("ldmatrix")
def ldmatrix(f: "Function", words: list[str], ops: list[str]) -> str:
    only(words, "sync aligned m8n8 x1 x2 x4 trans shared shared::cta b16")
    names, count = f.several(ops[0]), next(word[1] for word in words if word in ("x1", "x2", "x4"))
    if len(names) != int(count):
        raise UnknownError(f"{len(names)} registers")
    # the machine checks the alignment of rows; an address beyond the window is nobody's
    rows = f.address(ops[1], "shared", 16)
    code = f.call("ldmatrix", count, flag("trans" in words), "D", rows)
    return f"u32 D[{count}]; {code}; {_results(f, names)}"


@instruction("wgmma")
def wgmma(f: "Function", words: list[str], ops: list[str]) -> str:
    if words[0] == "fence":
        return f"{f.call('wgmma_fence')};"
    if words[0] == "commit_group":
        return "wgmma_commit();"
    if words[0] == "wait_group":
        land = "products.land(sums);" if f.poison.registers else ""
        return f"{f.call('wgmma_wait', ops[0])}; {land}"
    shape = re.fullmatch(r"m64n(\d+)k(\d+)", words[3])
    kind = words[-1]
    steps = "16" if kind in ("bf16", "f16") else "32"
    if shape is None or words[-3:] != ["f32", kind, kind] or shape[2] != steps:
        raise UnknownError("shape or dtypes of wgmma")
    names, held = f.several(ops[0]), ops[1].startswith("{")
    a, b, scale, *rest = ops[1:]
    if len(names) * 2 != int(shape[1]) or rest[:2] != ["1", "1"]:
        raise UnknownError("accumulators or signs of wgmma")
    turns = ["0", *rest[2:3], "0"][:2] if held else [*rest[2:4], "0", "0"][:2]
    own = ", ".join(f"&{found[0]}" for n in names if (found := f.register(n)))
    code = f"u32 *const D[] = {{{own}}}; float *sum = products.open(D, {f.at()}); "
    code += f"u32 A[] = {{{_list(f, f.several(a), 'u32')}}}; " if held else ""
    source = "A, 0" if held else f"nullptr, {f.value(a, 'u64')}"
    given = [shape[1], TYPES[kind], "sum", source, f.value(b, "u64"), f.value(scale, "bool")]
    return f"{code}{f.call('wgmma', *given, *turns)}; products.leave(D, sum);"


def _list(f: "Function", names: list[str], kind: str) -> str:
    return ", ".join(f.value(name, kind) for name in names)


def _results(f: "Function", names: list[str]) -> str:
    return " ".join(f.to(name, f"D[{i}]") for i, name in enumerate(names))


# ---- copies -------------------------------------------------------------------------------------
@instruction("cp")
def cp(f: "Function", words: list[str], ops: list[str]) -> str:
    bulk = "bulk" in words
    if "commit_group" in words:
        return "tma_store_commit();" if bulk else "cp_async_commit();"
    if "wait_group" in words or "wait_all" in words:
        if bulk:
            return f"tma_store_wait({ops[0]});"
        first = "cp_async_commit(); " if "wait_all" in words else ""
        return f"{first}{f.call('cp_async_wait', ops[0] if ops else '0')};"
    if bulk:
        return tensor(f, words, ops) if "tensor" in words else line(f, words, ops)
    only(words, "async ca cg shared shared::cta global L2::64B L2::128B L2::256B")
    read = f.value(ops[3], "s32") if len(ops) > 3 else ops[2]
    source = f"at_most({read}, {ops[2]}, {f.at()})"
    ends = f.address(ops[0], "shared", int(ops[2])), f.address(ops[1], "global")
    return f"{f.call('cp_async', *ends, ops[2], source)};"


def line(f: "Function", words: list[str], ops: list[str]) -> str:
    """Copy bytes that lie side by side."""
    out = words[2] == "global"
    only(
        words,
        "async bulk global shared::cta shared::cluster mbarrier::complete_tx::bytes bulk_group",
    )
    far, here = f.address(ops[1 - out], "global"), f.address(ops[out], "shared")
    size = f.value(ops[2], "s32")
    if out:
        return f"{f.call('bulk_store', far, here, size)};"
    return f"{f.call('bulk_load', here, far, size, f.address(ops[3], 'shared', 8))};"


def tensor(f: "Function", words: list[str], ops: list[str]) -> str:
    """Copy a box of an array that a descriptor describes."""
    known = "reduce async bulk tensor global tile bulk_group add multicast::cluster"
    only(words, f"{known} 1d 2d 3d 4d 5d {INTO}")
    out = "bulk_group" in words
    name, _, where = ops[1 - out].strip("[]").partition(",")
    coordinates = f.several(where.strip())
    if f"{len(coordinates)}d" not in words:
        raise UnknownError(f"{len(coordinates)} coordinates")
    code = f"const int c[] = {{{_list(f, coordinates, 's32')}}}; "
    far, here = f"(void *){f.value(name.strip(), 'u64')}", f.address(ops[out], "shared")
    count = str(len(coordinates))
    if out:
        adds = flag("reduce" in words)
        return f"{code}{f.call('tma_store', count, far, here, 'c', adds)};"
    ranks = f"u32({f.value(ops[3], 'u16')})" if len(ops) > 3 else "1u << M.cur->rank"
    given = [count, here, far, f.address(ops[2], "shared", 8), "c", ranks]
    return f"{code}{f.call('tma_load_multicast', *given)};"


@instruction("mbarrier")
def mbarrier(f: "Function", words: list[str], ops: list[str]) -> str:
    if words[0] == "init":
        bar = f.address(ops[0], "shared", 8)
        return f"{f.call('mbarrier_init', bar, f.value(ops[1], 's32'))};"
    if words[0] == "complete_tx":  # as many bytes as are expected have come
        size, bar = f.value(ops[1], "s32"), f.address(ops[0], "shared", 8)
        return f"{f.call('mbarrier_complete', bar, size)};"
    bar = f.address(ops[1], "shared", 8)
    if words[0] == "arrive" and ops[0] == "_":
        count = f.value(ops[2], "s32") if "expect_tx" in words else "0"
        return f"{f.call('mbarrier_arrive', bar, count)};"
    if words[0] in ("try_wait", "test_wait") and "parity" in words:  # it waits until it is true
        wait = f.call("mbarrier_wait", bar, f.value(ops[2], "s32"))
        return f"{wait}; {f.to(ops[0], 'true')}"
    raise UnknownError("mbarrier")


@instruction("mapa")
def mapa(f: "Function", words: list[str], ops: list[str]) -> str:
    rank = f.value(ops[2], "s32")
    if "u64" in words:
        own = f"(const void *){f.value(ops[1], 'u64')}"
        return f.to(ops[0], f"(u64){f.call('cluster_map', own, rank)}")
    own = f"near({f.value(ops[1], 'u32')}, 1, {f.at()})"
    checked = f.call("cluster_map", own, rank)
    return f.to(ops[0], f"({checked}, u32({rank} + 1) << 24 | {f.value(ops[1], 'u32')})")
