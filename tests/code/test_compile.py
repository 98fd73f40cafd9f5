"""Kernels compile with NVRTC, as CuPy calls it, and ptxas has no complaints.

No GPU is needed.  Every variant on every architecture has no spilled register, no array in local
memory, no unusual line of ptxas, and the resources of ``costs.toml``: exact bytes of shared memory,
registers within one allocation unit.  By default a run compiles one variant of each kernel for one
architecture, and others in the next runs; ``--sample all`` compiles all.
"""

import importlib
import io
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from unsloth_cupy.core.dtypes import BFLOAT16
from unsloth_cupy.core.gpu import CupyTarget, compiler_options
from unsloth_cupy.core.op import OPS
from unsloth_cupy.core.source import source_root
from unsloth_cupy.errors import KernelError
from unsloth_cupy.ops.attention import _decode
from unsloth_cupy.ops.losses import _launch
from unsloth_cupy.ops.norms import _norm
from unsloth_cupy.profiling import binary

from ..harness.sampling import Sample
from ..machines.stand_in import LIMITS, gpu, static_memory
from .hardware.primitives import PRIMITIVES, launch
from .programs import budget, costs_file, spills
from .programs import variants as variant_lists
from .programs.compilers import NEWEST, OLDEST
from .programs.variants import (
    ARCHITECTURES,
    Form,
    architectures,
    call,
    constants,
    declared,
    of_kernel,
    of_today,
    variants,
)

if (reason := budget.missing()) is not None:
    pytest.skip(reason, allow_module_level=True)
cupy = importlib.import_module("cupy")
compiler = importlib.import_module("cupy.cuda.compiler")
core = importlib.import_module("cupy._core.core")

EXAMPLES = Path(__file__).parent / "emulator/kernels"
HEAD, LINES = budget.read()


@pytest.fixture(scope="module", autouse=True)
def _without_a_device() -> Iterator[None]:
    """Patch the architecture, and whether to build a cubin, which CuPy reads from its device."""
    answer = lambda arch: (f"-arch=sm_{arch}", "cubin")  # noqa: E731
    with mock.patch("cupy.cuda.compiler._get_arch_for_options_for_nvrtc", answer):
        yield


@pytest.mark.parametrize("kernel", ["relu2", "attention_dq_sm90"])
def test_a_binary_is_the_one_that_cupy_makes(kernel: str) -> None:
    """Except for the last byte, which CuPy drops; ``precompile`` compiles as the tests do."""
    launch = of_kernel(kernel, "90")[0].launch
    options = core.assemble_cupy_compiler_options(compiler_options(launch.source))
    made, _ = compiler.compile_using_nvrtc(launch.source, (*options, "-ftz=true"), "90", "unit.cu")
    assert binary.compiled(launch.source, 90, ())[0] == made + b"\0"


def turns() -> list[tuple[str, str]]:
    """Return half of the kernels, each with one architecture, and with the next in two runs."""
    pairs = []
    for number, kernel in Sample.one_in(2, enumerate(declared())):
        archs = architectures(kernel)
        chosen = archs if Sample.all else (archs[(number // 2 + Sample.day // 2) % len(archs)],)
        pairs += [(kernel, arch) for arch in chosen]
    return pairs


def handed_out(source: str) -> int:
    """Return the sum of the registers that a block's warpgroups request; 0 for other kernels.

    A block has only the registers that its threads start with: for more, setmaxnreg waits forever.
    """
    said = constants(source)
    if "PRODUCER" not in said:
        return 0
    each = int(said["REGISTERS"]), int(said["PRODUCER"])
    assert all(24 <= count <= 256 and count % 8 == 0 for count in each)
    return 128 * (int(said["CONSUMERS"]) * each[0] + each[1])


@pytest.mark.parametrize("kernel", [k for k in declared() if k.endswith("_sm90") and "dq" not in k])
def test_a_block_has_the_registers_that_its_warpgroups_ask_for(kernel: str) -> None:
    """By costs.toml, for every variant; ``test_ptxas_is_content`` compiles some of them."""
    for variant in filter(budget.kept, of_kernel(kernel, "90")):
        registers, *_ = LINES[kernel][variant.label]["90"]
        expected = handed_out(variant.launch.source)
        assert 0 < expected <= registers * variant.launch.threads <= 65536, variant


@pytest.mark.parametrize(("kernel", "arch"), turns())
def test_ptxas_is_content(kernel: str, arch: str) -> None:
    same_compiler = HEAD["compiler"] == budget.compiler_version()
    for variant in of_today(kernel, arch):
        launch = variant.launch
        used = budget.resources(launch, variant.arch)
        assert used.spilled == used.local == 0, variant
        assert used.complaints == (), variant
        assert used.registers * launch.threads >= handed_out(launch.source), variant
        assert used.shared + launch.shared <= LIMITS[arch][3], variant
        actual = budget.numbers(variant)
        assert actual[3] > 50 or kernel in HEAD["reasons"], f"{variant}: say why in costs.toml"
        if same_compiler and budget.kept(variant):
            line = LINES[kernel][variant.label][arch]
            cure = f"look at it; then python -m tests.code.programs.budget --write {kernel}"
            message = f"{variant}: {actual}, and the file has {line}: {cure}"
            assert actual[1:3] == line[1:3], message  # shared memory
            assert abs(actual[0] - line[0]) <= budget.REGISTER_UNIT, message


@pytest.mark.slow
def test_no_pair_of_attentions_options_spills_on_warpgroups() -> None:
    """A third of some calls of ``programs/spills.py``, chosen by the sample's number, or all.

    With steps of 337 calls, no sample is without a kernel on warpgroups.
    """
    first, every = (0, 1) if Sample.all else (Sample.day % 337, 337)
    several = [*spills.launches(first, every)]
    assert several
    if not Sample.all:
        several = several[Sample.day // 337 % len(several) :: 3]
    assert [(name, size) for launch, name in several if (size := spills.spilled(launch))] == []


def test_the_budget_has_a_line_for_each_variant_and_no_other() -> None:
    several = [v for arch in ARCHITECTURES for v in variants(arch) if budget.kept(v)]
    asked = {(v.kernel, v.label, v.arch) for v in several}
    kept = {(k, v, a) for k, table in LINES.items() for v, by in table.items() for a in by}
    changed = sorted({kernel for kernel, *_ in asked ^ kept})
    assert not changed, f"python -m tests.code.programs.budget --write {' '.join(changed)}"


def test_static_and_dynamic_memory_of_every_variant_fit_together() -> None:
    taken = [
        (kernel, label, arch, numbers[1] + numbers[2])
        for kernel, table in LINES.items()
        for label, by in table.items()
        for arch, numbers in by.items()
    ]
    assert len(taken) > 1000
    assert not [line for line in taken if line[3] > LIMITS[line[2]][3]]
    left = {  # what launch tables that fill the memory of a block leave for its static part
        "attention_decode": _decode.STATIC,
        "cross_entropy_over_": _launch.STATIC,
        "norm_backward": _norm.STATIC,
    }
    tables = {k for k in dynamic() if not k.startswith(("delta_", "ssd_"))}  # tiles of a chunk
    beside = {k: most for k, most in static_memory().items() if most and k in tables}
    assert {k: most <= left.get(k, 0) for k, most in beside.items()} == dict.fromkeys(left, True)


def dynamic() -> set[str]:
    """Return the kernels that use dynamic shared memory."""
    several = (
        (k, numbers) for k, t in LINES.items() for by in t.values() for numbers in by.values()
    )
    return {kernel for kernel, numbers in several if numbers[2]}


def test_the_compiler_of_this_environment_is_supported() -> None:
    ends = [tuple(map(int, version.split("."))) for version in (OLDEST, NEWEST)]
    assert ends[0] <= cupy.cuda.nvrtc.getVersion() <= ends[1]


def test_reasons_are_of_kernels_that_need_one() -> None:
    low = {
        kernel
        for kernel, table in LINES.items()
        if any(numbers[3] <= 50 for by in table.values() for numbers in by.values())
    }
    assert HEAD["reasons"].keys() == low
    assert all(len(why.split()) > 4 for why in HEAD["reasons"].values())


def test_the_budget_is_as_it_is_written() -> None:
    assert "\n".join(budget.text(HEAD, LINES)) == costs_file.texts()["kernels"]


def test_every_kernel_is_asked_for_and_labels_are_unique() -> None:
    assert set(declared()) == {variant.kernel for variant in variants("90")}
    for arch in ARCHITECTURES:
        labels = [(variant.kernel, variant.label) for variant in variants(arch)]
        assert len(labels) == len(set(labels))


def test_a_kept_list_is_that_of_its_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list is built again if a kernel changes, or if the sources are in another folder."""
    keys = [variant_lists._sources.__wrapped__()]
    (tmp_path / "add.cu").write_text("KERNEL(256) add(float *x) {}")
    monkeypatch.setattr(variant_lists, "source_root", lambda: tmp_path)
    keys.append(variant_lists._sources.__wrapped__())
    (tmp_path / "add.cu").write_text("KERNEL(128) add(float *x) {}")
    keys.append(variant_lists._sources.__wrapped__())
    assert len(set(keys)) == 3
    assert keys == [*keys[:2], variant_lists._sources.__wrapped__()]


FIXED = {  # switches that never change, and why
    ("attention_bias.cu", "BIAS"): "the kernel computes the gradient of a bias",
    ("attention_bias.cu", "FOLD"): "a bias comes between the product and exp",
    ("attention_decode.cu", "VARLEN"): "a table of pages says where sequences lie",
    ("attention_backward_sm90.cu", "DROPOUT"): "as in the forward pass",
    ("attention_backward_sm90.cu", "T"): "tensor cores multiply no float32",
    ("attention_dq_sm90.cu", "T"): "tensor cores multiply no float32",
    ("attention_forward_sm90.cu", "DROPOUT"): "random words would spill its sums",
    ("attention_forward_sm90.cu", "T"): "tensor cores multiply no float32",
    ("gather_pages.cu", "T"): "shapes of pages in float16 have few queries",
    ("gated_delta_rule_backward.cu", "T"): "the shape of float16 has tensor cores",
    ("gated_delta_rule_backward_mma.cu", "CHANNELS"): "one decay for each head",
    ("gated_delta_rule_backward_mma.cu", "T"): "tensor cores multiply no float32",
    ("gated_delta_rule_channels.cu", "CHANNELS"): "each column of keys has a decay of its own",
    ("gated_delta_rule_channels.cu", "T"): "the shape of float16 has one decay for each head",
    ("gated_delta_rule_mma.cu", "CHANNELS"): "one decay for each head",
    ("gated_delta_rule_mma.cu", "T"): "tensor cores multiply no float32: gated_delta_rule.cu",
    ("grouped_float32.cu", "T"): "16 bits have grouped_linear.cu",
    ("grouped_linear.cu", "T"): "tensor cores multiply no float32: grouped_float32.cu",
    ("grouped_linear_sm90.cu", "T"): "tensor cores multiply no float32: grouped_float32.cu",
    ("lora_expand.cu", "T"): "cuBLAS multiplies float32",
    ("log_probs.cu", "T"): "logits are in float32, whatever the weights are",
    ("ssd_backward_mma.cu", "T"): "as of ssd_mma.cu",
    ("ssd_mma.cu", "T"): "tensor cores multiply no float32: ssd.cu",
    ("top_k_divergence.cu", "T"): "as of log_probs.cu",
    ("rope_append.cu", "INTERLEAVED"): "neighbouring pairs rotate apart from the append",
}


def test_every_switch_is_on_and_off() -> None:
    """And every dtype that one kernel takes is taken by the others of its file."""
    seen: dict[tuple[str, str], set[str]] = {}
    for arch in ARCHITECTURES:
        for variant in variants(arch):
            file = re.findall(r'^#include "(\w+\.cu)"$', variant.launch.source, re.M)[0]
            for name, value in constants(variant.launch.source).items():
                seen.setdefault((file, name), set()).add(value)
    switches = {key: values for key, values in seen.items() if values & {"true", "false"}}
    stuck = {key for key, values in switches.items() if values != {"true", "false"}}
    dtypes = {key: values for key, values in seen.items() if key[1] == "T"}
    stuck |= {
        key for key, values in dtypes.items() if values != {"__half", "__nv_bfloat16", "float"}
    }
    assert stuck == FIXED.keys()


@pytest.mark.skipif(Sample.all, reason="all are looked at")
def test_the_sample_visits_every_variant() -> None:
    for kernel in declared():
        archs = architectures(kernel)
        several = of_kernel(kernel, archs[0])
        days = range(0, len(archs) * len(several), len(archs))
        seen = {str(v) for day in days for v in of_today(kernel, archs[0], day)}
        assert seen == {*map(str, several)}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_cupy_alone_names_the_architecture(arch: str) -> None:
    """NVRTC before 12.9 takes no second -arch; it is asked for no kernel that needs sm_90a."""
    several = {v.launch.options for v in variants(arch) if "_sm90" not in v.kernel}
    (options,) = several
    assert not any(re.match("-arch|--gpu-architecture", option) for option in options)
    assert "-std=c++17" in options
    named = {v.launch.options for v in variants(arch)} - several
    assert named == ({(*options, "-arch=sm_90a")} if arch == "90" else set())


@pytest.mark.parametrize(
    ("arch", "registers", "shared", "threads", "percent"),
    [
        ("90", 32, 0, 1024, 100),
        ("90", 33, 0, 1024, 50),  # registers come by 8 a thread: one block of 1024 at 40
        ("90", 255, 0, 128, 12),
        ("80", 64, 0, 256, 50),
        ("80", 16, 48 << 10, 128, 18),  # three blocks of 49 KiB
        ("86", 16, 0, 32, 33),  # 16 blocks of a warp
        ("89", 16, 0, 32, 50),
        ("120", 40, 99 << 10, 1024, 66),
    ],
)
def test_occupancy(arch: str, registers: int, shared: int, threads: int, percent: int) -> None:
    assert binary.occupancy(int(arch), registers, shared, threads) == percent


SPILLS = """
extern "C" __global__ void __launch_bounds__(1024) spills(float *x) {
    float v[128];
    for (int i = 0; i < 128; i++) v[i] = x[i * 1024 + threadIdx.x];
    for (int k = 0; k < 9; k++)
        for (int i = 0; i < 128; i++) v[i] = v[i] * v[(i * 7 + k) % 128] + x[i];
    for (int i = 0; i < 128; i++) x[i * 1024 + threadIdx.x] = v[i];
}
extern "C" __global__ void local(float *x, int i) {
    float v[64];
    for (int k = 0; k < 64; k++) v[k * i % 64] = x[k * k];
    x[0] = v[i];
}
extern "C" __global__ void content(float *x) { x[0] = 1; }
"""


@pytest.mark.slow
def test_what_ptxas_complains_of_is_read() -> None:
    actual = budget.read_log(budget.cubin(SPILLS, ("-std=c++17",), "90")[1])
    assert actual["spills"].spilled > 0
    assert actual["local"].local >= 256
    assert actual["content"][2:] == (0, 0, ())
    for name in ("spills", "local"):
        assert any(f"'{name}'" in line for line in actual[name].complaints)


def test_advice_about_no_kernel_counts_for_all() -> None:
    advice = "ptxas info    : (C7510) Potential Performance Loss: wgmma is serialized"
    log = budget.cubin(SPILLS, ("-std=c++17",), "90")[1]
    assert budget.read_log(log + advice)["content"].complaints == (advice,)
    assert budget.read_log(f"{log}{advice} in 'local'")["content"].complaints == ()


WITH_WGMMA = {"90": ("-arch=sm_90a",)}  # for NVRTC from 12.9 on, which takes the first of two


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    "file",
    ["flash.cu", "split_k.cu", "primitives.cu", "gemm.cu", "products.cu", "cluster.cu"],
)
def test_the_examples_of_the_emulator_compile(file: str, arch: str) -> None:
    if file in ("primitives.cu", "gemm.cu") and arch != "90":
        pytest.skip("wgmma and TMA need sm_90a")
    source = f'#include "common/device.cuh"\n#include "{file}"\n'
    names = {made.kernel for made in map(launch, PRIMITIVES) if made.file == file}
    templates = sorted(name for name in names if "<" in name and arch == "90")
    asked = Sample.one_in(4, templates)
    flags = (*compiler_options(), *WITH_WGMMA.get(arch, ()), "--ptxas-options=-v", f"-I{EXAMPLES}")
    options = core.assemble_cupy_compiler_options(flags)
    log = io.StringIO()
    _cubin, mapping = compiler.compile_using_nvrtc(
        source, (*options, "-ftz=true"), arch, "unit.cu", asked, log
    )
    assert len(mapping or ()) == len(asked)
    assert not re.search("warning", log.getvalue(), re.I), log.getvalue()


def test_cupy_keeps_the_architecture_with_wgmma() -> None:
    """CuPy appends -arch=sm_90 to -arch=sm_90a; NVRTC does not document which one it uses."""
    source = 'extern "C" __global__ void k(int *x) { x[0] = 1; }'
    assert ".target sm_90a" in ptx(source, "90", *WITH_WGMMA["90"])


def ptx(source: str, arch: str, *more: str) -> str:
    """Return the code that NVRTC compiles from a unit, with CuPy's options for kernels."""
    options = core.assemble_cupy_compiler_options((*compiler_options(source), *more))
    with pytest.MonkeyPatch.context() as patch:
        answer = lambda arch: (f"-arch=sm_{arch}", "ptx")  # noqa: E731
        patch.setattr(compiler, "_get_arch_for_options_for_nvrtc", answer)
        made, _ = compiler.compile_using_nvrtc(source, (*options, "-ftz=true"), arch, "unit.cu")
    return str(made.decode())


CONSTANT_DIVISOR = r"\bdiv\.[\w.]*f32\s+%\w+, %\w+, 0[fF]\w+;"
DIVISIONS = """
#include <common/device.cuh>
#include <common/math.cuh>
extern "C" __global__ void by_constant(float *x) { x[0] = x[0] / 24; }
extern "C" __global__ void rounded(float *x) { x[0] = divided_by<24>(x[0]); }
extern "C" __global__ void exact(float *x) { x[0] = divided_by<16>(x[0]); }
"""


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_division_is_rounded_once(arch: str) -> None:
    """From sm_100 on, NVRTC compiles x / 24 to a product with the rounded reciprocal."""
    _, by_constant, rounded, exact = ptx(DIVISIONS, arch).split(".visible .entry")
    assert bool(re.search(CONSTANT_DIVISOR, by_constant)) == (int(arch) < 100)
    assert re.search(r"\bdiv\.rn\.ftz\.f32", rounded)
    assert not re.search(r"\bmul|" + CONSTANT_DIVISOR, rounded)
    assert re.search(r"\bmul\.ftz\.f32 .*0f3D800000;", exact)  # 1 / 16


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_far_angles_are_exact_where_columns_are_no_power_of_two(arch: str) -> None:
    """At position 131072 an exponent that is rounded twice is 0.004 rad off."""
    form = Form({"heads": 4, "kv_heads": 2, "dim": 96, "half": 48}, (), BFLOAT16, False, {})
    with gpu(arch) as machine:
        call(OPS["apply_rotary_embedding_forward"], form, machine).run()
        (launch,) = machine.launches
    made = ptx(launch.source, arch)
    assert constants(launch.source)["HALF"] == "48"
    assert constants(launch.source)["ANGLES"] == "true"
    assert re.search(r"\bdiv\.rn\.ftz\.f32", made)
    reciprocal = struct.pack(">f", 1 / 96).hex()
    assert not re.search(f"mul.*0f{reciprocal}", made, re.I)


PRODUCT = """#include <common/hopper.cuh>
extern "C" __global__ void k(float *x, uint64_t a, uint64_t b, float by, int turns) {
  float d[32];
  for (int i = 0; i < 32; i++) d[i] = x[i * 128 + threadIdx.x];
  wgmma_fence(d);
  wgmma_m64n64k16_bf16<0, 0>(d, a, b, 1);
  wgmma_commit();
  for (int turn = 0; turn < turns; turn++) {  // of which d * by + 1 seems to know nothing
    wgmma_wait<0>(d);
    for (int i = 0; i < 32; i++) x[(turn * 32 + i) * 128 + threadIdx.x] = d[i] * by + 1;
  }
}
"""


def test_nothing_computes_with_an_accumulator_before_its_wait() -> None:
    nvrtc = cupy.cuda.nvrtc
    program = nvrtc.createProgram(PRODUCT, "k.cu", [], [])
    options = core.assemble_cupy_compiler_options(("-std=c++17", f"-I{source_root()}"))
    nvrtc.compileProgram(program, ("-arch=compute_90a", *options))
    instructions = re.findall(r"wgmma\.\w+|fma", nvrtc.getPTX(program).decode())
    assert [name for name in instructions if name != "fma"] == [
        "wgmma.fence",
        "wgmma.mma_async",
        "wgmma.commit_group",
        "wgmma.wait_group",
    ]
    assert instructions.count("fma") == 32
    assert instructions.index("fma") > instructions.index("wgmma.wait_group")


def test_cupy_finds_the_cuda_headers_itself() -> None:
    """We pass no path to cuda_fp16.h: CuPy does, wherever pip or a toolkit put it."""
    ours = core.assemble_cupy_compiler_options(compiler_options())
    paths = [option[2:] for option in ours if option.startswith("-I")]
    assert any((Path(path) / "cuda_fp16.h").exists() for path in paths)


def test_a_compile_error_shows_file_constants_and_log(monkeypatch: pytest.MonkeyPatch) -> None:
    class RawModule:  # as CuPy's, on a device of compute capability 9.0 that it does not need
        def __init__(self, code: str, options: tuple[str, ...]) -> None:
            self.code, self.options = code, core.assemble_cupy_compiler_options(options)

        def get_function(self, name: str) -> Any:
            return compiler.compile_using_nvrtc(self.code, self.options, "90", "unit.cu")

    class Device:
        compute_capability = "90"

    monkeypatch.setattr(cupy, "RawModule", RawModule)
    monkeypatch.setattr(cupy.cuda, "Device", Device)
    whole = next(v for v in variants("90") if v.kernel == "norm_forward").launch.source
    source = re.sub(r"ROW_THREADS = \d+", "ROW_THREADS = 0", whole)
    with pytest.raises(KernelError) as caught:
        CupyTarget().compile("norm_forward", source)
    for part in ("norm_forward does not compile", "error", "ROW_THREADS = 0", '"norm.cu"'):
        assert part in str(caught.value), str(caught.value)
