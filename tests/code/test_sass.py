"""SASS of the kernels: 16-byte accesses, asynchronous copies, tensor cores, no local memory.

One variant of each kernel for one architecture is checked, always the same, so that only a change
of a kernel or of the compiler can fail; ``--sample all`` checks all variants.
"""

import re
from collections import Counter

import pytest

from ..harness.sampling import Sample
from .programs import budget, warpgroups
from .programs.ptx import ptx
from .programs.sass import (
    PRODUCT,
    SIZES,
    disassembled,
    hot_loop,
    instructions,
    loops,
    nvdisasm,
    row,
    shown,
    whole,
)
from .programs.sass_waits import BEFORE, unwaited, waited_in_ptx, waited_in_sass
from .programs.variants import ARCHITECTURES, Variant, constants, declared, of_kernel, of_today

if (reason := budget.missing()) is not None:
    pytest.skip(reason, allow_module_level=True)
try:
    nvdisasm()
except LookupError as error:
    pytest.skip(str(error), allow_module_level=True)

INTEGERS = r"IMMA\.16832\.S8"
COPY = r"LDGSTS\.E.*128"  # to shared memory, of 16 bytes


def load(size: int) -> str:
    """Return the pattern of a load of this many bytes; without G, its address space is unknown."""
    return rf"LDG?\.E\.{8 * size}\b"


def store(size: int) -> str:
    """Return the pattern of a store of this many bytes."""
    return rf"STG?\.E\.{8 * size}\b"


READ, WRITE = load(16), store(16)
# Tiles come by TMA, products read them there, warpgroups hand registers over.
WARPGROUPS = (
    *("UTMALDG.4D", r"HGMMA\.64x", "SYNCS", "USETMAXREG.DEALLOC", "USETMAXREG.TRY_ALLOC"),
    WRITE,
)
# Kernels that do otherwise, what they show instead, and why.
OTHERS = {
    "cross_entropy_forward": (READ,),  # a row gives two numbers
    "log_probs_forward": (READ,),  # a row gives a handful of numbers
    "divergence_forward": (READ,),  # a row gives one number
    "top_k_divergence_forward": (READ,),  # a row gives one number, and those that were kept
    "attention_forward": (COPY, PRODUCT),  # reads go to shared memory; results leave by fragments
    "attention_forward_sm90": WARPGROUPS,
    "attention_backward_sm90": WARPGROUPS,
    "attention_decode": (COPY, PRODUCT),
    "attention_backward": (COPY, PRODUCT),
    "attention_bias": (COPY, PRODUCT),
    "attention_delta": (READ,),  # a row gives two numbers
    "attention_sum": (),  # a thread adds what neighbours of it read
    "lora_gradients": (COPY, PRODUCT),
    "lora_gradient_sums": (),  # a warp reads 32 neighbouring sums
    "lora_expand_": (READ, WRITE, PRODUCT),
    "noise": (WRITE,),  # it reads nothing
    "loss_scaler": (),  # three numbers
    "bit_scale": (READ,),  # a sum is one number
    "bit_codes": (READ,),  # codes take a half or a quarter of the bytes
    "bit_gradient": (READ,),  # 16 bits of a sum of 32
    "embedding_starts": (),  # one index a thread
    "int8_dequantize_": (WRITE,),  # codes take a half or a quarter of the bytes
    "int8_few_rows_": (READ,),  # a sum is one number
    "int8_linear": (COPY, INTEGERS),
    "int8_outliers": (),  # a warp reads 32 neighbouring columns
    "int8_outlier_list": (),  # one flag a thread
    "latent_attention": (COPY, PRODUCT),
    "kv_append_int8_": (READ,),  # codes take a half or a quarter of the bytes
    "int8_quantize": (READ,),  # codes take a half or a quarter of the bytes
    "nf4_quantize": (READ,),  # codes take a quarter or an eighth
    "nf4_dequantize_": (WRITE,),
    "nf4_product_": (READ, PRODUCT),
    "nf4_rounded_sum_": (READ,),  # of a; a thread writes four values of 16 bits
    "rounded_sum_": (READ,),
    "grouped_linear": (COPY, PRODUCT, WRITE),
    "grouped_linear_sm90": (COPY, *WARPGROUPS[1:]),
    "delta_chunks": (READ,),  # a warp writes neighbouring values of its results
    "delta_states": (READ,),
    "delta_chunks_mma": (COPY, PRODUCT, WRITE),
    "delta_states_mma": (COPY, PRODUCT),  # of out, and of U: lanes write neighbouring pairs
    "delta_state_gradients": (READ,),
    "delta_state_gradients_mma": (COPY, PRODUCT, WRITE),
    "delta_chunk_gradients_mma": (COPY, PRODUCT, WRITE),
    "selective_scan": (),  # neighbours read neighbouring values, into registers
    "selective_scan_backward": (),
    "ssd_rates": (),  # two numbers for each token and head
    "ssd_chunks": (READ,),
    "ssd_states": (READ,),
    "ssd_states_mma": (COPY, PRODUCT),  # eight lanes write neighbouring values of a state
    "ssd_state_gradients_mma": (COPY, PRODUCT, WRITE),
    "ssd_step": (),
    "ssd_state_gradients": (READ,),
    "ssd_chunk_gradients": (),  # a thread reads one value, its neighbour the next
    "ssd_rate_gradients": (),  # one number for each token and head
    "delta_chunk_gradients": (),  # a warp reads and writes neighbouring values
    "delta_step": (),
    "delta_channel_chunks": (),  # a lane has a channel, and writes neighbouring values of results
    "delta_pair_gradients": (),  # as delta_chunk_gradients
    "delta_channel_gradients": (READ,),
    "grouped_float32": (),  # a warp reads neighbouring values, into registers
    "group_tiles": (),  # three numbers for each tile
    "group_sums": (),  # a warp reads 32 neighbouring columns
    "route_forward": (),  # a lane holds every 32nd expert, as neighbours hold the next
    "route_backward": (),
    "router_sums": (),
    "router_loss": (),
    "router_loss_backward": (),
    "sort_counts": (),  # a lane reads one number, as its neighbours read the next
    "sort_by_expert": (),
    "ternary_dense_": (WRITE,),  # two bits make a value
    "ternary_linear": (READ,),  # and a product: see wanted
    "ternary_scores": ("POPC",),
    "column_sum": (),  # a warp reads 32 neighbouring columns of float32: 128 bytes all the same
}


# Kernels that wait for a tile while they multiply the one before.
AHEAD = ("attention_backward_sm90",)


def many(kernel: str, given: dict[str, str]) -> tuple[str, ...]:
    """Return the accesses of a kernel over many tensors: four values, 16 bytes of float32."""
    kind = int(given["KINDS"]).bit_length() - 1  # as common/many.cuh says
    flags = ("COPIED", "WIDE", "CODED")
    copy, wide, coded = (bool(kind & int(given.get(flag, 0))) for flag in flags)
    size = 16 if kind % 4 == 2 else 8
    if kernel == "measure":
        return (load(size), *[WRITE] * (given["WRITE"] == "true"))
    if kernel == "rescale":
        return load(size), store(size)
    shown = {load(size), store(size)} if not copy else {READ, WRITE, store(size)}
    shown |= {load(16 if wide else size)}
    return *sorted(shown), *(() if coded else (READ, WRITE))  # codes: four bytes, as one number


def wanted(variant: Variant) -> tuple[str, ...]:
    """Return the instructions that a variant must have."""
    kernel, values = variant.kernel, constants(variant.launch.source)
    if "KINDS" in values:
        return many(kernel, values)
    shown = OTHERS.get(kernel, (READ, WRITE))
    if kernel == "ternary_linear":
        shown = READ, INTEGERS if values["X"] == "signed char" else PRODUCT
    if values.get("T") == "float":
        shown = tuple(name for name in shown if name != PRODUCT)  # FMAs, for accuracy
    named = "cross_entropy_backward", "cross_entropy_over_", "log_probs_backward"
    named += ("divergence_backward", "top_k_divergence_backward")
    narrow = {"cast": "U", "beside": "U", **dict.fromkeys(named, "G")}.get(kernel)
    if narrow is not None:  # a result of another dtype: as many values
        shown = READ, store(SIZES[values[narrow]] * int(values["LANES"]))
    return shown


@pytest.mark.slow
@pytest.mark.parametrize("kernel", declared())
def test_the_hardware_is_told(kernel: str) -> None:
    turn = declared().index(kernel) % len(ARCHITECTURES)
    archs = ARCHITECTURES if Sample.all else ARCHITECTURES[turn : turn + 1]
    several = [v for arch in archs for v in of_kernel(kernel, arch)]
    several = several or [*of_kernel(kernel, "90")]  # what it is made for
    wide = [v for v in several if whole(v)] or several
    for variant in several if Sample.all else wide[len(wide) // 2 :][:1]:
        text = disassembled(variant)
        actual = instructions(text)
        local = {name for name in actual if name.startswith(("LDL", "STL"))}
        assert not local, variant
        asked = wanted(variant) if whole(variant) else ()
        missing = [name for name in asked if not any(re.match(name, each) for each in actual)]
        assert not missing, f"{variant} lacks {missing}: {sorted({*actual})}"
        assert unwaited(text, ahead=kernel in AHEAD) == [], variant


def told(dim: int) -> list[str]:
    """Return the instructions of a tile's loop on Hopper, in order."""
    names = instructions("\n".join(warpgroups.loop(warpgroups.disassembled(dim))))
    return [name for name in names if not name.startswith("NOP")]


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 128])
def test_exponentials_run_beside_products(dim: int) -> None:
    """All are between the products and the wait for their sums, which starts the next iteration."""
    names = told(dim)
    last = max(at for at, name in enumerate(names) if name.startswith("HGMMA"))
    waits = [at for at, name in enumerate(names) if name.startswith("WARPGROUP.DEPBAR")]
    scores, sums = waits[-1], waits[0]
    assert sums < last < scores  # the loop begins with the wait for the sums of the turn before
    exponentials = [at for at, name in enumerate(names) if name.startswith("MUFU.EX2")]
    assert len(exponentials) >= 64
    assert sum(at < scores for at in exponentials) <= 2  # by what sums shrink


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 128])
def test_registers_are_ready_when_products_are_asked_for(dim: int) -> None:
    """No probability is computed after the fence that passes registers to the tensor cores."""
    names = told(dim)
    asked = [at for at, name in enumerate(names) if name.startswith(("HGMMA", "WARPGROUP.ARRIVE"))]
    made = [at for at, name in enumerate(names) if name.startswith("F2FP")]
    assert len(made) >= 32
    assert not [at for at in made if asked[0] < at < asked[-1]]


@pytest.mark.parametrize(("dim", "most"), [(64, 440), (128, 500)])
def test_a_tile_takes_few_instructions(dim: int, most: int) -> None:
    """The page has the same numbers, if the compiler is the one that it names."""
    tile, more = warpgroups.forward(dim)
    assert tile.counts.total() <= most
    assert tile.counts["FMUL"] < 16  # scores are scaled by what subtracts their maximum
    assert tile.shapes == warpgroups.PEERS[dim].shapes
    assert all(n <= warpgroups.PEERS[dim].cycles()[pipe] for pipe, n in tile.cycles().items())
    assert warpgroups.estimate(tile) > warpgroups.estimate(warpgroups.PEERS[dim])
    assert more == dim // 2
    if budget.read()[0]["compiler"] == budget.compiler_version():
        row = f"| `{warpgroups.KERNEL}.cu` | {dim} | "
        lines = budget.PAGE.read_text(encoding="utf-8").splitlines()
        (written,) = [line for line in lines if line.startswith(row)]
        own = warpgroups.line("", dim, tile, f"+{more}", "", "").split("|")
        kept = written.split("|")
        cure = "python -m tests.code.programs.warpgroups --write"
        assert [own[3:11], own[13:]] == [kept[3:11], kept[13:]], cure


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 128])
def test_a_causal_tile_takes_hardly_more(dim: int) -> None:
    """Only tiles on the diagonal are masked, where the peer masks all of them."""
    tile, _ = warpgroups.forward(dim, causal=True)
    peer, full = warpgroups.PEERS[dim], warpgroups.forward(dim)[0]
    assert full.counts.total() <= tile.counts.total() <= full.counts.total() + 8
    assert all(n <= peer.cycles()[pipe] for pipe, n in tile.cycles().items())
    assert warpgroups.estimate(tile) > warpgroups.estimate(peer)


@pytest.mark.slow
@pytest.mark.parametrize("own", [0, 1], ids=["queries", "keys"])
def test_products_of_the_backward_pass_follow_each_other(own: int) -> None:
    """No wait is for a single product, and most of exp2 overlaps with those of dout and v."""
    text = disassembled(warpgroups.variants_back(128)[own])
    body, _ = warpgroups.seldom(warpgroups.loop(text))
    names = instructions("\n".join(body))
    products = [at for at, name in enumerate(names) if name.startswith("HGMMA")]
    waits = [at for at, name in enumerate(names) if name.startswith("WARPGROUP.DEPBAR")]
    exponentials = [at for at, name in enumerate(names) if name.startswith("MUFU.EX2")]
    assert len(products) >= 22
    assert len(waits) <= 4
    gradients = waits[1]  # the loop begins with the wait for scores
    assert gradients < products[0]
    assert sum(at < gradients for at in exponentials) >= len(exponentials) // 2


@pytest.mark.slow
def test_the_page_says_what_the_backward_pass_compiles_to() -> None:
    if budget.read()[0]["compiler"] != budget.compiler_version():
        pytest.skip("another compiler than the page speaks of")
    written = budget.PAGE.read_text(encoding="utf-8").splitlines()
    lines = [*warpgroups.rows_back((128,))]
    assert [line for line in lines if line not in written] == [], (
        "python -m tests.code.programs.warpgroups --write"
    )
    assert len(lines) == 4


def test_the_model_says_of_the_peer_what_was_measured() -> None:
    assert round(warpgroups.estimate(warpgroups.PEERS[128])) == warpgroups.MEASURED
    assert warpgroups.PEERS[128].counts.total() == 704
    assert warpgroups.PEERS[64].counts.total() == 637


def test_the_model_counts_what_products_read_in_shared_memory() -> None:
    """64 x 64 x 16 with both operands in shared memory uses all of its rate; with one, half."""
    assert warpgroups.Tile(Counter(), Counter({64: 1}), Counter(), 0).cycles()["shared"] == 32
    assert (
        warpgroups.Tile(Counter(), Counter({64: 1}), Counter({64: 1}), 128).cycles()["shared"]
        == 16 + 1
    )
    tile, _ = warpgroups.forward(128)
    assert tile.kept == {128: 8}
    assert tile.moved == 128 * 2 * 256 // 2  # keys and values of a stage, for two warpgroups


@pytest.mark.slow
def test_no_store_of_a_gradient_over_logits_is_split() -> None:
    """See ``store`` in common/vector.cuh: a store of 16 bytes may be split into four of 4."""
    several = [
        variant
        for arch in (ARCHITECTURES if Sample.all else ("90",))
        for variant in of_kernel("cross_entropy_over_", arch)
        if constants(variant.launch.source)["RAGGED"] == "false"  # else 4 bytes where rows meet
    ]
    for variant in several if Sample.all else several[-1:]:
        actual = instructions(disassembled(variant))
        short = [name for name in actual if re.fullmatch(r"STG?\.E(\.EF)?", name)]
        assert len(short) == 2, variant  # of a loss


@pytest.mark.slow
def test_the_disassembler_is_read() -> None:
    slow = next(v for v in of_kernel("add", "90") if not whole(v))
    actual = instructions(disassembled(slow))
    assert "EXIT" in actual
    assert not any(re.match(f"{READ}|{WRITE}", name) for name in actual)


def test_loops_are_found() -> None:
    text = """
.L_x_1:
        /*0000*/                   MOV R1, R2 ;
.L_x_2:
        /*0010*/              @!P0 HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0020*/               @P1 BRA `(.L_x_2) ;
        /*0030*/               @P1 BRA `(.L_x_3) ;
        /*0040*/                   BRA `(.L_x_1) ;
.L_x_3:
        /*0050*/                   EXIT ;
"""
    assert loops(text) == [(2, 1), (5, 1)]


COPIES = """
        /*0000*/                   LDGSTS.E.BYPASS.128 [R1], [R2.64] ;
        /*0010*/                   LDGDEPBAR ;
        /*0020*/              @!PT LDS RZ, [RZ] ;
.L_x_1:
        /*0030*/                   DEPBAR.LE SB0, 0x0 ;
        /*0040*/               @P1 BRA `(.L_x_2) ;
        /*0050*/                   LDGSTS.E.BYPASS.128 [R1], [R2.64] ;
.L_x_2:
        /*0060*/                   LDGDEPBAR ;
        /*0070*/                   LDSM.16.M88.4 R8, [R1] ;
        /*0080*/               @P0 BRA `(.L_x_1) ;
        /*0090*/                   EXIT ;
"""
TILES = """
        /*0000*/               @P0 BRA `(.L_x_1) ;
        /*0010*/                   UTMALDG.4D [UR8], [UR4] ;
        /*0020*/                   EXIT ;
.L_x_1:
        /*0030*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R3 ;
        /*0040*/              @!P0 BRA `(.L_x_1) ;
.L_x_3:
        /*0050*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0060*/                   SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR5], RZ ;
        /*0070*/               @P1 BRA `(.L_x_1) ;
        /*0080*/                   EXIT ;
"""


@pytest.mark.parametrize(
    ("text", "old", "new"),
    [
        (COPIES, "DEPBAR.LE SB0, 0x0", "NOP"),
        (COPIES, "DEPBAR.LE SB0, 0x0", "DEPBAR.LE SB0, 0x2"),
        (COPIES, ".L_x_1:\n        /*0030*/                   DEPBAR.LE SB0, 0x0 ;", ".L_x_1:"),
        (TILES, "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R3", "NOP"),
        (TILES, "@P0 BRA `(.L_x_1)", "@P0 BRA `(.L_x_3)"),
        (TILES, "@P1 BRA `(.L_x_1)", "@P1 BRA `(.L_x_3)"),
    ],
)
def test_a_read_that_waits_for_no_copy_is_found(text: str, old: str, new: str) -> None:
    assert unwaited(text) == []
    assert unwaited(text.replace(old, new, 1)) != []


@pytest.mark.slow
def test_a_wait_of_a_kernel_is_needed() -> None:
    """Without any wait except the last, after which nothing is read, the check fails."""
    text = disassembled(of_kernel("attention_forward", "80")[3])
    waits = [wait.span() for wait in re.finditer(r"DEPBAR\.LE SB0, 0x\w+", text)]
    unwaited_reads = [unwaited(f"{text[:begin]}NOP{text[end:]}") for begin, end in waits]
    assert [bool(reads) for reads in unwaited_reads] == [True, True, False]


WARPGROUP_KERNELS = [kernel for kernel in declared() if kernel.endswith("_sm90")]


@pytest.mark.slow
@pytest.mark.parametrize("kernel", WARPGROUP_KERNELS)
def test_warpgroups_wait_in_sass_as_in_ptx(kernel: str) -> None:
    """They wait as often on every path before a product, a copy or an arrival, and in loops."""
    for variant in of_today(kernel, "90"):
        asked = waited_in_ptx(ptx(variant.launch.source, kernel, "90a"))
        assert waited_in_sass(disassembled(variant)) == asked, variant
        products = [line for line in asked["HGMMA"] if line[0] == 0]
        assert not products, f"{variant}: a product comes before all waits"


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [k for k in WARPGROUP_KERNELS if "dq" not in k])
def test_every_wait_of_warpgroups_is_needed(kernel: str) -> None:
    """Without a wait, except the second try of one, SASS differs from PTX or fails the check."""
    text = disassembled(of_kernel(kernel, "90")[0])
    asked = waited_in_sass(text)
    waits = [[*re.finditer(f"{pattern}[^;]*", text)] for pattern in BEFORE]
    first = waits[0][: len(waits[0]) // 2]  # second tries stand behind the end
    assert min(len(first), len(waits[1])) > 3
    for wait in Sample.one_in(3, (*first, *waits[1])):
        without = f"{text[: wait.start()]}NOP{text[wait.end() :]}"
        assert waited_in_sass(without) != asked or unwaited(without, kernel in AHEAD), wait


NEXT = """
        /*0000*/                   UTMALDG.4D [UR8], [UR4] ;
        /*0010*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R3 ;
.L_x_1:
        /*0020*/                   UISETP.GE.AND UP1, UPT, UR14, UR13, UPT ;
        /*0030*/                   PLOP3.LUT P0, PT, PT, PT, UP1, 0x80, 0x0 ;
        /*0040*/               @P0 BRA `(.L_x_2) ;
        /*0050*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR5], R3 ;
.L_x_2:
        /*0060*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0070*/                   UISETP.GE.AND UP0, UPT, UR14, UR13, UPT ;
        /*0080*/                   PLOP3.LUT P1, PT, PT, PT, UP0, 0x80, 0x0 ;
        /*0090*/               @P1 BRA `(.L_x_3) ;
        /*00a0*/                   SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR5], RZ ;
        /*00b0*/                   UIADD3 UR14, UR14, 0x1, URZ ;
        /*00c0*/                   BRA `(.L_x_1) ;
.L_x_3:
        /*00d0*/                   EXIT ;
"""


ASKED = "UISETP.GE.AND UP0, UPT, UR14, UR13, UPT ;"  # by the branch out of the loop
COPY = "UMOV UR7, UR14 ;\n /*0*/ UIADD3 UR14, UR14, 0x1, URZ ;\n /*0*/"


@pytest.mark.parametrize(
    ("old", "new", "waits"),
    [
        ("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR5], R3", "NOP", False),
        # What the second branch asks: another number, another predicate, the opposite.
        ("HGMMA", "UIADD3 UR14, UR14, 0x1, URZ ;\n /*0*/ HGMMA", False),
        ("HGMMA", "UIMAD.WIDE UR12, UR2, 0x1, URZ ;\n /*0*/ HGMMA", False),
        ("HGMMA", "USHF.R.U64 UR13, UR2, 0x1, URZ ;\n /*0*/ HGMMA", False),
        ("HGMMA", "USHF.R.U64 UR12, UR2, 0x1, URZ ;\n /*0*/ HGMMA", True),  # writes UR12 alone
        ("UP0, 0x80", "UP2, 0x80", False),
        ("UP0, 0x80", "UP0, 0x40", False),
        ("@P1 BRA", "@!P1 BRA", False),
        (ASKED, ASKED.replace("UISETP.GE", "UISETP.GT"), False),
        (ASKED, ASKED.replace("AND", "AND.EX").replace("UPT ;", "UPT, UP3 ;"), False),
        (ASKED, f"@UP4 {ASKED}", False),
        (ASKED, f"{COPY} {ASKED}", False),
        (ASKED, f"{COPY} {ASKED}".replace("UP0, UPT, UR14", "UP0, UPT, UR7"), True),
        (ASKED, f"{COPY} {ASKED}".replace("UP0, UPT, UR14", "UP0, UPT, UR8"), False),
    ],
)
def test_a_wait_for_the_next_tile_may_be_left_out_of_the_last_turn_alone(
    old: str, new: str, waits: bool
) -> None:
    assert unwaited(NEXT, ahead=1) == []
    assert unwaited(NEXT) != []
    assert (unwaited(NEXT.replace(old, new, 1), ahead=1) == []) is waits


@pytest.mark.parametrize(
    ("between", "waits"),
    [
        ("UIADD3 UR14, UR14, 0x1, URZ ;", True),  # of what was compared
        ("IADD3 R1, UP1, R2, R3, RZ ;", False),
        ("UISETP.GE.AND UP1, UPT, UR14, UR12, UPT ;", False),
        ("SHFL.IDX UP0, UP1, R2, R3 ;", False),
    ],
)
def test_a_predicate_is_known_until_it_is_written(between: str, waits: bool) -> None:
    text = NEXT.replace(ASKED, between).replace("UP0, 0x80", "UP1, 0x80")
    assert (unwaited(text, ahead=1) == []) is waits


def test_the_opposite_of_a_predicate_is_known() -> None:
    text = NEXT.replace("UP0, 0x80", "UP0, 0x40").replace("@P1 BRA", "@!P1 BRA")
    assert unwaited(text, ahead=1) == []


BESIDE = """
.L_x_1:
        /*0000*/                   LDG.E.128 R4, [R2.64] ;
        /*0010*/                   FADD R1, R1, R4 ;
.L_x_2:
        /*0020*/                   FADD R1, R1, R5 ;
        /*0030*/                   LDS R2, [R1] ;
        /*0040*/               @P1 BRA `(.L_x_2) ;
        /*0050*/               @P0 BRA `(.L_x_1) ;
"""
END = """
        /*0060*/                   EXIT ;
.L_x_3:
        /*0070*/                   BRA `(.L_x_3) ;
        /*0080*/                   NOP ;
"""
PRODUCTS = """
.L_x_4:
        /*0000*/                   IMMA.16832.S8.S8 R4, R8.ROW, R12.COL, R4 ;
        /*0010*/                   FADD R1, R1, R4 ;
        /*0020*/               @P0 BRA `(.L_x_4) ;
"""


AGAIN = PRODUCTS.replace("_4", "_5").replace("IMMA", "FADD R1, R1, R4 ;\n /*0*/ IMMA", 1)


@pytest.mark.parametrize(
    ("text", "instructions"),
    [
        (BESIDE + END, 3),  # the innermost, not the one with most accesses
        (PRODUCTS + BESIDE.replace("LDS", "LDG.E.128 R1 ;\n /*0*/ LDS") + END, 3),  # multiplies
        (AGAIN + PRODUCTS + END, 3),  # of equal products, the shortest
        (AGAIN + END, 4),
        ("/*0*/ LDG.E R1 ;" + END, 2),  # all, without the loop behind the end
    ],
)
def test_the_hot_loop_is_found(text: str, instructions: int) -> None:
    assert hot_loop(text) == instructions


@pytest.mark.slow
def test_the_page_says_what_attention_compiles_to() -> None:
    head, _ = budget.read()
    if head["compiler"] != budget.compiler_version():
        pytest.skip("another compiler than the page speaks of")
    written: dict[tuple[str, ...], list[str]] = {}
    for line in budget.PAGE.read_text(encoding="utf-8").splitlines():
        cells = line.strip("| ").split(" | ")
        written[tuple(cells[:3])] = cells
    for line in map(row, Sample.one_in(11, shown())):
        cells = line.strip("| ").split(" | ")
        expected = written[tuple(cells[:3])]
        cure = f"{line}: python -m tests.code.programs.sass --write"
        assert [*cells[:5], *cells[7:]] == [*expected[:5], *expected[7:]], cure
        assert abs(int(cells[5]) - int(expected[5])) <= budget.REGISTER_UNIT, cure
