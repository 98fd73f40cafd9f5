"""From a source file and its constants to a launch, on a target that only takes notes."""

from pathlib import Path

import numpy as np
import pytest

from unsloth_cupy import rms_norm
from unsloth_cupy.core import kernel as core_kernel
from unsloth_cupy.core import source as core_source
from unsloth_cupy.core import target
from unsloth_cupy.core.dtypes import BFLOAT16
from unsloth_cupy.errors import KernelError

from ..machines.stand_in import gpu

SOURCE = """
KERNEL(256) plain(const T *__restrict__ x, float *y, const int *lengths, int rows, float eps) {}
KERNEL(THREADS, 2)
several_lines(const unsigned char *bytes,
              long long size, size_t offset, bool flag) {}
KERNEL(32) strange(quaternion *x) {}
KERNEL(32) by_value(float *x, const __grid_constant__ Sizes sizes) {}
KERNEL(32) takes_unknown(const __grid_constant__ Strange sizes) {}
"""
HEADER = """
struct Pair { int first, second; };

// What a kernel takes by value; of several lines.
struct Sizes {
    bool even;  // a comment; with a semicolon
    long long rows, columns[3];
    Pair pair;
    unsigned char last;
};
struct Strange { float *x; };
"""


class Notes:
    """A target that keeps what it was asked to compile and to launch."""

    def __init__(self) -> None:
        self.sources: list[str] = []
        self.launches: list[tuple] = []

    def owns(self, array: object) -> bool:
        return isinstance(array, np.ndarray)

    def compile(self, name: str, source: str) -> target.Launch:
        self.sources.append(source)
        return lambda *launch: self.launches.append((name, *launch))


@pytest.fixture(autouse=True)
def _sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "common").mkdir()
    (tmp_path / "test.cu").write_text("#include <common/sizes.cuh>" + SOURCE)
    (tmp_path / "common/sizes.cuh").write_text(HEADER)
    monkeypatch.setattr(core_source, "source_root", lambda: tmp_path)
    core_source.digest.cache_clear()
    yield
    core_source.digest.cache_clear()


def load(notes: Notes, name: str = "plain", **constants: object) -> core_kernel.Kernel:
    with target.using(notes):
        return core_kernel.load("test.cu", name, np.ones(1), core_source.Constants(**constants))


def arguments() -> list:
    x, y, lengths = np.ones(4, np.float16), np.ones(4, np.float32), np.ones(4, np.int32)
    return [x, y, lengths, 4, 1e-6]


def test_constants_are_typed() -> None:
    unit = core_source.translation_unit("test.cu", {"HIDDEN": 4096, "CAUSAL": True, "T": BFLOAT16})
    assert unit.splitlines()[1:] == [
        '#include "common/device.cuh"',
        "constexpr int HIDDEN = 4096;",
        "constexpr bool CAUSAL = true;",
        "using T = __nv_bfloat16;",
        '#include "test.cu"',
    ]


def test_the_digest_follows_every_source(tmp_path: Path) -> None:
    """CuPy's cache on disk knows the unit alone, so the unit must change with what it includes."""
    before = core_source.translation_unit("test.cu", {})
    assert core_source.digest() in before
    (tmp_path / "common" / "reduce.cuh").write_text("// new")
    core_source.digest.cache_clear()
    assert core_source.translation_unit("test.cu", {}) != before


def test_parameters_are_read_off_the_source() -> None:
    f32, i32 = np.dtype("float32"), np.dtype("int32")
    assert core_source.parameters("test.cu", "plain", {"T": BFLOAT16, "HIDDEN": 8}) == (
        (BFLOAT16, True),
        (f32, True),
        (i32, True),
        (i32, False),
        (f32, False),
    )
    assert core_source.parameters("test.cu", "several_lines", {"THREADS": 32}) == (
        (np.dtype("uint8"), True),
        (np.dtype("int64"), False),
        (np.dtype("uint64"), False),
        (np.dtype("bool"), False),
    )


def test_a_struct_is_read_off_the_headers() -> None:
    pair = np.dtype([("first", "i4"), ("second", "i4")])
    members = [("even", "?"), ("rows", "i8"), ("columns", "i8", (3,)), ("pair", pair)]
    sizes = np.dtype([*members, ("last", "u1")], align=True)
    assert core_source.parameters("test.cu", "by_value", {})[1] == (sizes, False)
    assert sizes.itemsize == 56
    with pytest.raises(
        KernelError, match=r"takes_unknown has a parameter of unknown type: .* Strange"
    ):
        core_source.parameters("test.cu", "takes_unknown", {})


def test_a_dict_becomes_a_struct() -> None:
    notes, x = Notes(), np.ones(4, np.float32)
    fields = {"last": 7, "pair": (5, 6), "columns": [2, 3, 4], "rows": 2**40, "even": True}
    kernel = load(notes, "by_value")
    kernel[1, 32](x, fields)
    made = notes.launches[0][3][1]
    assert type(made) is np.void
    assert str(made) == "(True, 1099511627776, [2, 3, 4], (5, 6), 7)"
    for wrong in (fields | {"more": 1}, {n: v for n, v in fields.items() if n != "pair"}):
        with pytest.raises(TypeError):
            load(Notes(), "by_value")[1, 32](x, wrong)


def test_sources_that_declare_something_else_raise() -> None:
    with pytest.raises(KernelError, match=r"test.cu declares no KERNEL\(\.\.\.\) other"):
        core_source.parameters("test.cu", "other", {})
    with pytest.raises(KernelError, match=r"strange has a parameter of unknown type: quaternion"):
        core_source.parameters("test.cu", "strange", {})


def test_scalars_get_the_types_of_the_source() -> None:
    notes = Notes()
    kernel = load(notes, T=np.float16)
    kernel[3, 256](*arguments())
    (name, grid, block, args, shared) = notes.launches[0]
    assert (name, grid, block, shared) == ("plain", (3,), (256,), 0)
    assert [type(arg) for arg in args[3:]] == [np.int32, np.float32]
    kernel[(3, 2), (32, 4), 1024](*arguments())
    assert notes.launches[1][1:3] == ((3, 2), (32, 4))
    assert notes.launches[1][4] == 1024


def test_an_absent_array_is_a_null_pointer() -> None:
    notes = Notes()
    x, _, *rest = arguments()
    load(notes, T=np.float16)[1, 32](x, None, *rest)
    assert notes.launches[0][3][1] == 0
    assert type(notes.launches[0][3][1]) is np.uintp


@pytest.mark.parametrize("grid", [0, (4, 0)])
def test_an_empty_grid_is_not_launched(grid) -> None:
    notes = Notes()
    load(notes, T=np.float16)[grid, 32](*arguments())
    assert notes.launches == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, *rest: rest, "takes 5 arguments"),
        (lambda x, *rest: (x, *rest, 1), "takes 5 arguments"),
        (lambda x, *rest: (x.astype(np.float32), *rest), "float32 .* is not contiguous float16"),
        (lambda x, *rest: (x[::2], *rest), r"float16 \(4,\) is not contiguous float16"),
    ],
    ids=["few", "many", "dtype", "strides"],
)
def test_wrong_arguments_raise(change, message: str) -> None:
    notes = Notes()
    kernel = load(notes, T=np.float16)
    with pytest.raises(KernelError, match=message) as error:
        kernel[1, 32](*change(*arguments()))
    assert "plain of test.cu with {'T': " in str(error.value)
    assert notes.launches == []


def test_a_kernel_is_compiled_once_per_constants() -> None:
    notes = Notes()
    first, again = load(notes, T=np.float16), load(notes, T=np.float16)
    other = load(notes, T=np.float32)
    assert first is again
    assert first is not other
    assert len(notes.sources) == 2
    assert load(Notes(), T=np.float16) is not first


def test_without_a_target_nothing_loads() -> None:
    with pytest.raises(KernelError, match="plain: no target runs kernels on ndarray"):
        core_kernel.load("test.cu", "plain", np.ones(1), core_source.Constants())


def test_a_target_is_used_inside_its_block_only() -> None:
    array, outer, inner = np.ones(1), Notes(), Notes()
    with target.using(outer):
        with target.using(inner):
            assert target.target_of(array) is inner
        assert target.target_of(array) is outer
        with pytest.raises(ZeroDivisionError), target.using(inner):
            raise ZeroDivisionError
        assert target.target_of(array) is outer
    assert target.target_of(array) is None


@pytest.mark.parametrize(
    ("capability", "compiler", "says"),
    [
        ("75", (12, 9), "kernels need a GPU of sm_80 or newer; this one is sm_75"),
        ("100", (12, 7), "NVRTC 12.7 does not compile for sm_100; install a newer one"),
        ("103", (12, 8), "NVRTC 12.8 does not compile for sm_103; install a newer one"),
        ("103", (12, 9), None),
        ("90", (12, 0), None),
    ],
)
def test_what_no_compiler_serves_is_refused_in_a_sentence(
    capability: str, compiler: tuple[int, int], says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise CuPy compiles for sm_90, which another GPU does not load."""
    monkeypatch.undo()  # the real sources
    core_kernel._kernel.cache_clear()
    with gpu("90", devices=1) as machine:
        machine.gpus.capability, machine.compiler = capability, compiler
        x, weight = machine.array((2, 64), "float32"), machine.array((64,), "float32")
        if says is None:
            rms_norm(x, weight)
            assert machine.launches
        else:
            with pytest.raises(KernelError) as error:
                rms_norm(x, weight)
            assert str(error.value).endswith(says)
