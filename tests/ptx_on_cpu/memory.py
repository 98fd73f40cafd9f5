"""Control, calls, addresses, accesses of memory and atomics."""

import re
from typing import TYPE_CHECKING

from .instructions import BITS, SIZE, WIDTH, flag, instruction, only
from .parse import UnknownError, operands

if TYPE_CHECKING:
    from .translate import Function

STRONG = ("volatile", "relaxed", "acquire", "release", "mmio")
SCOPES = "cta cluster gpu sys"
CACHES = "ca cg cs cv lu wb wt nc L1::no_allocate L1::evict_last L1::evict_first L2::128B L2::256B"
SPACES = "global shared shared::cta shared::cluster local param const"
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
def bra(f: "Function", words: list[str], ops: list[str]) -> str:
    return f"goto {f.label(ops[0])};"


@instruction("ret", "exit")
def ret(f: "Function", words: list[str], ops: list[str]) -> str:
    if f.word == "exit" and not f.entry:
        raise UnknownError("exit inside of a function")
    return "return;"


@instruction("trap", "brkpt")
def trap(f: "Function", words: list[str], ops: list[str]) -> str:
    return f'fail("{f.word}", {f.at()});'


@instruction("prefetch", "prefetchu", "setmaxnreg", "nanosleep", "discard", "createpolicy")
def nothing(f: "Function", words: list[str], ops: list[str]) -> str:
    return ""


@instruction("call")
def call(f: "Function", words: list[str], ops: list[str]) -> str:
    """Results and arguments lie in variables of the space .param, in the order of the head."""
    at = next(i for i, op in enumerate(ops) if not op.startswith("("))
    given = [name for op in ops if op.startswith("(") for name in operands(op[1:-1])]
    cells = ", ".join(f"(void *){f.symbols[name][1]}" for name in given)
    return f"void *cells[] = {{{cells or 'nullptr'}}}; f_{ops[at]}(cells);"


@instruction("cvta")
def cvta(f: "Function", words: list[str], ops: list[str]) -> str:
    target, source = ops
    value = f.value(source, "u64" if "u64" in words else "u32")
    if "shared" not in words:
        return f.to(target, value)
    if "to" in words:
        return f.to(target, f"shared_address((const void *)u64({value}), {f.at()})")
    return f.to(target, f"(u64)near({value}, 0, {f.at()})")


@instruction("isspacep")
def isspacep(f: "Function", words: list[str], ops: list[str]) -> str:
    raise UnknownError("isspacep")


def space_of(words: list[str]) -> str:
    """Return the space that is named, or nothing."""
    return next((word for word in words if word in SPACES.split()), "")


def access(f: "Function", words: list[str], address: str, write: bool) -> tuple[str, str, int]:
    """Return what makes p point at checked bytes; the type of a value, and how many there are."""
    only(words[:-1], f"{' '.join(STRONG)} {SCOPES} {CACHES} {SPACES} v2 v4 v8")
    kind, space = WIDTH[words[-1]], space_of(words)
    count = next((int(word[1]) for word in words if re.fullmatch(r"v[248]", word)), 1)
    size = SIZE[kind] * count
    pointer = f.address(address, space, size)
    if space == "param":
        return f"char *p = {pointer};", kind, count
    if any(word in words for word in STRONG):
        checked = f"access_volatile({pointer}, {size}, {flag(write)}, {f.at()})"
    else:
        checked = f"access({pointer}, {size}, {'Write' if write else 'Read'}, {f.at()})"
    return f"char *p = {checked};", kind, count


@instruction("ld", "ldu")
def ld(f: "Function", words: list[str], ops: list[str]) -> str:
    code, kind, count = access(f, words, ops[1], write=False)
    names = f.several(ops[0])
    if len(names) != count:
        raise UnknownError(f"{len(names)} registers")
    fence = "threadfence(true);" if "acquire" in words else ""
    return f"{code} {' '.join(f.to(n, f'get<{kind}>(p, {i})') for i, n in enumerate(names))}{fence}"


@instruction("st")
def st(f: "Function", words: list[str], ops: list[str]) -> str:
    if words[0] == "async":
        only(words[1:], "shared::cluster mbarrier::complete_tx::bytes b32 u32 s32 f32")
        to, value = f.value(ops[0].strip("[]"), "u32"), f.value(ops[1], "u32")
        own = [f"near({f.value(o.strip('[]'), 'u32')} & 0xffffff, 4, {f.at()})" for o in ops[::2]]
        return f"{f.call('store_async', own[0], value, own[1], f'rank_of({to})')};"
    code, kind, count = access(f, words, ops[0], write=True)
    values = f.several(ops[1])
    if len(values) != count:
        raise UnknownError(f"{len(values)} values")
    fence = "threadfence(true); " if "release" in words else ""
    writes = (f"set<{kind}>(p, {i}, {f.value(v, kind)});" for i, v in enumerate(values))
    return f"{fence}{code} {' '.join(writes)}"


@instruction("atom", "red")
def atom(f: "Function", words: list[str], ops: list[str]) -> str:
    ops = ops if f.word == "atom" else ["_", *ops]
    kind, what = WIDTH[words[-1]], next(word for word in words if word in ATOMICS)
    only(words[:-1], f"{what} relaxed acquire release acq_rel {SCOPES} {SPACES}")
    if words[-1] not in ("b32", "b64", "u32", "u64", "s32", "s64", "f32", "f64"):
        raise UnknownError(words[-1])
    if what in ("cas", "exch", "and", "or", "xor"):
        kind = BITS[kind]
    pointer = f.address(ops[1], space_of(words), SIZE[kind])
    v = [f.value(o, kind) for o in ops[2:]]
    given = f"{kind} v = {v[0]}{f', w = {v[1]}' if what == 'cas' else ''};"
    code = (
        f"atomic<{kind}>({pointer}, {f.at()}, [&]({kind} x) {{ return {kind}({ATOMICS[what]}); }})"
    )
    fence = f"threadfence({flag('cta' not in words)});"
    before = fence if {"release", "acq_rel"} & {*words} else ""
    after = fence if {"acquire", "acq_rel"} & {*words} else ""
    return f"{before} {given} {f.to(ops[0], code)} {after}"


@instruction("membar")
def membar(f: "Function", words: list[str], ops: list[str]) -> str:
    only(words, "cta gl sys")
    return f"threadfence({flag(words[0] != 'cta')});"


@instruction("fence")
def fence(f: "Function", words: list[str], ops: list[str]) -> str:
    if words[0] == "mbarrier_init":
        return "mbarrier_init_fence();"
    if words[0] == "proxy":
        only(words[1:], "async shared::cta shared::cluster global")
        return "fence_proxy_async();"
    only(words, f"sc acq_rel {SCOPES}")
    return f"threadfence({flag('cta' not in words)});"
