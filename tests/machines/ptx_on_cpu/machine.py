"""The tables of PTX's control, memory, warps, tensor cores and copies: see function.py."""

from ...code.programs.ptx import SIZE, WIDTH, UnknownError, operands, several
from .function import BITS, RULES, Function, Operand, Ops, Words, only, spelled, writes

SCOPES = "cta cluster gpu sys"
SPACES = "global shared shared::cta shared::cluster local param const"
STRONG = "volatile relaxed acquire release mmio"
CACHES = "ca cg cs cv lu wb wt nc L1::no_allocate L1::evict_last L1::evict_first L2::128B L2::256B"
OWN = ".shared::cta.b64"
TENSOR, BYTES = "cp.async.bulk.tensor", ".mbarrier::complete_tx::bytes"
# The K of a product: the values of each operand that an element of the result sums.
STEPS = {"bf16": 16, "f16": 16, "tf32": 8, "s8": 32, "e4m3": 32, "e5m2": 32}
MACHINE = {
    # control
    "bra[.uni|]": "goto {x:label};",
    "ret[.uni|]": "return;",
    "trap": 'trap("trap", {at});',
    "setmaxnreg[.inc|.dec].sync.aligned.u32": "{x:-};",
    "prefetch.tensormap": "{x:-};",
    # addresses
    "cvta[.to|][.global|.param|.local|.const].u64": "{x}",
    "cvta.shared.u64": "(u64)near({x}, 0, {at})",
    "cvta.to.shared.u64": "shared_address((const void *){x}, {at})",
    "mapa.u64": "(u64)cluster_map((const void *){x}, {y:s32}, {at})",
    "mapa.shared::cluster.u32": "map_shared({x}, {y:s32}, {at})",
    # barriers and fences
    "bar.sync": "barrier({x:s32}, {y:s32?}, true, {line});",
    "bar.arrive": "barrier({x:s32}, {y:s32}, false, {line});",
    "bar.warp.sync": "syncwarp({x:u32}, {line});",
    "barrier.cluster.arrive.aligned": "cluster_arrive(false, {line});",
    "barrier.cluster.arrive.relaxed.aligned": "cluster_arrive(true, {line});",
    "barrier.cluster.wait.aligned": "cluster_wait({line});",
    "[membar[.gl|.sys]|fence[.sc|.acq_rel][.cluster|.gpu|.sys]]": "threadfence(true);",
    "[membar|fence[.sc|.acq_rel]].cta": "threadfence(false);",
    "fence.mbarrier_init.release.cluster": "mbarrier_init_fence();",
    "fence.proxy.async[.shared::cta|.global]": "fence_proxy_async();",
    f"mbarrier.init{OWN}": "mbarrier_init({x:a8}, {y:s32}, {at});",
    "mbarrier.arrive[.shared::cta|.release.cluster.shared::cluster].b64": (
        "{x:_} mbarrier_arrive({y:a8}, 0, {at});"
    ),
    f"mbarrier.arrive.expect_tx{OWN}": "{x:_} mbarrier_arrive({y:a8}, {z:s32}, {at});",
    # signals the arrival of bytes
    "mbarrier.complete_tx.relaxed.cluster.shared::cluster.b64": (
        "mbarrier_complete({x:a8}, {y:s32}, {at});"
    ),
    # waits until the phase is complete, and returns true
    f"mbarrier.try_wait.parity[.acquire.cluster|]{OWN}": (
        "(mbarrier_wait({x:a8}, {y:s32}, {at}), true)"
    ),
    # warps
    "vote.sync.ballot.b32": "ballot({y:u32}, {x:bool}, {line})",
    "vote.sync.any.pred": "ballot({y:u32}, {x}, {line}) != 0",
    "vote.sync.all.pred": "ballot({y:u32}, !{x}, {line}) == 0",
    "shfl.sync.[up|down|bfly|idx].b32": (
        "bool in; int from = source('{words[2][0]}', {z:u32}, {v:u32}, &in);"
        " u32 got = shfl({w:u32}, {y:u32}, from, {line}); {x:got|in};"
    ),
    "wgmma.fence.sync.aligned": "wgmma_fence({at});",
    "wgmma.commit_group.sync.aligned": "wgmma_commit();",
    "wgmma.wait_group.sync.aligned": "wgmma_wait({x:#}, {at}); products.land({{{sums}}});",
    # the machine checks the alignment of rows; an address beyond the window is nobody's
    "ldmatrix.sync.aligned.m8n8.x[2|4|4.trans].shared.b16": (
        "u32 D[4]; ldmatrix({words[4][1]}, {has[trans]}, D, {y:a16}, {at}); {x:D*{words[4][1]}};"
    ),
    # copies
    "cp.async.commit_group": "cp_async_commit();",
    "cp.async.cg.shared.global": (
        "cp_async({x:a{z:#}}, {y:g}, {z:#}, at_most({v:s32}, {z:#}, {at}), {at});"
    ),
    "cp.async.wait_group": "cp_async_wait({x:#}, {at});",
    "cp.async.wait_all": "cp_async_commit(); cp_async_wait(0, {at});",
    "cp.async.bulk.commit_group": "tma_store_commit();",
    "cp.async.bulk.wait_group": "tma_store_wait({x:#}, false);",
    "cp.async.bulk.wait_group.read": "tma_store_wait({x:#}, true);",
    "cp.async.bulk.global.shared::cta.bulk_group": "bulk_store({x:g}, {y:a}, {z:s32}, {at});",
    "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32": (
        "bulk_add((float *){x:g}, {y:a}, {z:s32}, {at});"
    ),
    f"cp.async.bulk.shared::cluster.global{BYTES}": (
        "bulk_load({x:a}, {y:g}, {z:s32}, {v:a8}, {at});"
    ),
    # copies of a box of an array by a tensor map
    f"{TENSOR}[.2d|.3d|.4d].shared::cluster.global.tile{BYTES}": (
        "const int c[] = {y:s32*{words[4][0]}};"
        " tma_load({words[4][0]}, {x:a}, (void *){y:u64}, {z:a8}, c, {at});"
    ),
    f"{TENSOR}.2d.shared::cluster.global.tile{BYTES}.multicast::cluster": (
        "const int c[] = {y:s32*{words[4][0]}};"
        " tma_load_multicast({words[4][0]}, {x:a}, (void *){y:u64}, {z:a8}, c, {v:u16}, {at});"
    ),
    f"{TENSOR}.2d.global.shared::cta.tile.bulk_group": (
        "const int c[] = {x:s32*{words[4][0]}};"
        " tma_store({words[4][0]}, (void *){x:u64}, {y:a}, c, false, {at});"
    ),
    "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group": (
        "const int c[] = {x:s32*{words[5][0]}};"
        " tma_store({words[5][0]}, (void *){x:u64}, {y:a}, c, true, {at});"
    ),
    "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32": (
        "store_async(own({x:u32}, {at}), {y:u32}, own({z:u32}, {at}), rank_of({x:u32}), {at});"
    ),
}
for _kind, _steps in STEPS.items():
    _sum = "s32" if _kind == "s8" else "f32"
    MACHINE[f"mma.sync.aligned.m16n8k{_steps}.row.col.{_sum}.{_kind}.{_kind}.{_sum}"] = (
        "u32 A[] = {y:u32*4}, B[] = {z:u32*2}, C[] = {v:u32*4}, D[4];"
        f" mma({_kind.upper()}, D, A, B, C, {{at}}); {{x:D*4}};"
    )
RULES.update(spelled(MACHINE))
ATOMICS = "add inc exch min max and or xor cas"


@writes("call")
def call(f: Function, words: Words, ops: Ops) -> str:
    """Write a call: results and arguments are .param variables, in the order of the declaration."""
    (name,) = (op for op in ops if not op.startswith("("))
    variables = [each for op in ops if op.startswith("(") for each in operands(op[1:-1])]
    cells = ", ".join(f"(void *)s_{each}" for each in variables)
    return f"void *cells[] = {{{cells or 'nullptr'}}}; f_{name}(cells);"


# ---- memory -------------------------------------------------------------------------------------
def space_of(words: Words) -> str:
    """Return the state space that the instruction names, or ""."""
    return next((word for word in words if word in SPACES.split()), "")


@writes("ld", "st")
def access(f: Function, words: Words, ops: Ops) -> str:
    """Write a load or a store: p points to the checked bytes, with one value for each register."""
    verb, *more, last = words
    only(more, f"{STRONG} {SCOPES} {CACHES} {SPACES} v2 v4 v8")
    address, names = (ops[1], ops[0]) if verb == "ld" else ops
    names, kind, space = several(names), BITS.get(WIDTH[last], ""), space_of(words)
    kind = WIDTH[last] if last[0] == "s" else kind  # signed, as a wider register is sign-extended
    size = SIZE[kind] * len(names)
    if len(names) != next((int(word[1]) for word in more if word in ("v2", "v4", "v8")), 1):
        raise UnknownError(f"{len(names)} registers")
    pointer = f.address(address, space, size)
    if space != "param":
        strong = not {*STRONG.split()}.isdisjoint(more)
        pointer = f"accessed({pointer}, {size}, {int(verb == 'st')}, {int(strong)}, {f.at()})"
    if verb == "ld":
        each = (f.to(name, f"get<{kind}>(p, {i})") for i, name in enumerate(names))
    else:
        each = (f"set<{kind}>(p, {i}, {f.value(v, kind)});" for i, v in enumerate(names))
    before, after = ("threadfence(true);" * (word in more) for word in ("release", "acquire"))
    polled = f"polled({f.at()});" * (verb == "ld") * bool(after)
    return f"{before} {polled} char *p = {pointer}; {' '.join(each)} {after}"


@writes("atom", "red")
def atom(f: Function, words: Words, ops: Ops) -> str:
    """Write an atomic operation, with or without a result."""
    target, address, *arguments = ops if words[0] == "atom" else ("_", *ops)
    _, *more, last = words
    (what,) = (word for word in more if word in ATOMICS.split())
    only(more, f"{what} relaxed acquire release acq_rel {SCOPES} {SPACES}")
    only([last], "b32 b64 u32 u64 s32 s64 f32 f64")
    kind, name = WIDTH[last], what.upper() if what == "cas" else what.title()
    pointer = f"({kind} *){f.address(address, space_of(words), SIZE[kind])}"
    values = ", ".join(f.value(each, kind) for each in arguments)
    fence = f"threadfence({int('cta' not in words)});"
    before = fence * (not {"release", "acq_rel"}.isdisjoint(words))
    after = fence * (not {"acquire", "acq_rel"}.isdisjoint(words))
    return f"{before} {f.to(target, f'atomic{name}({pointer}, {values}, {f.at()})', kind)} {after}"


@writes("bar.red.popc.u32", "bar.red.or.pred", "bar.red.and.pred")
def vote(f: Function, words: Words, ops: Ops) -> str:
    """Write a barrier that also counts votes."""
    target, number, *threads, predicate = ops
    numbers = [f.value(each, "s32") for each in (number, *(threads or "0"))]
    negated, test = {"popc": ("", ""), "or": ("", " != 0"), "and": ("!", " == 0")}[words[2]]
    own = f"{', '.join(numbers)}, {negated}{f.value(predicate, 'bool')}, {f.at(collective=True)}"
    return f.to(target, f"barrier_count({own}){test}")


# ---- warps and tensor cores ---------------------------------------------------------------------
@writes("wgmma.mma_async.sync.aligned")
def wgmma(f: Function, words: Words, ops: Ops) -> str:
    """Write a wgmma; A is in registers, or in shared memory like B."""
    names, (kind, shape) = several(ops[0]), (words[-1], words[4])
    if words[4:] != (f"m64n{2 * len(names)}k{STEPS[kind]}", "f32", kind, kind):
        raise UnknownError(f"accumulators, {shape} or dtypes of wgmma")
    a, b, scale, *signs = ops[1:]
    if signs[:2] != ["1", "1"]:
        raise UnknownError("signs of wgmma")
    in_registers = a.startswith("{")
    registers = Operand(f, a, {}).__format__("u32*4") if in_registers else "nullptr"
    transposed = [*["0"] * in_registers, *signs[2:], "0", "0"][:2]
    descriptors = ["0" if in_registers else f.value(a, "u64"), f.value(b, "u64")]
    arguments = [*descriptors, f.value(scale, "bool"), *transposed]
    own = ", ".join(f"&{f.register(name)}" for name in names)
    opened = f"u32 *const D[] = {{{own}}}; float *sum = products.open(D, {f.at()});"
    called = f"wgmma({2 * len(names)}, {kind.upper()}, sum, A, {', '.join(arguments)}, {f.at()});"
    return f"u32 {'A[]' if in_registers else '*A'} = {registers}; {opened} {called}"
