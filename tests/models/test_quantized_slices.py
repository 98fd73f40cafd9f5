"""Slices of quantized weights in files: values of the whole, from few more bytes than theirs."""

from math import gcd
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unsloth_cupy import ternary_quantize
from unsloth_cupy.core.dtypes import BFLOAT16
from unsloth_cupy.errors import ConfigError
from unsloth_cupy.models import load
from unsloth_cupy.models.folders.lazy_parameter import LazyParameter
from unsloth_cupy.models.folders.quantized_slices import narrow
from unsloth_cupy.models.quantizer import CHOICES, KINDS
from unsloth_cupy.ops.quantized.nf4 import Nf4
from unsloth_cupy.ops.quantized.ternary import Ternary
from unsloth_cupy.ops.quantized.weight import Quantized, in_blocks
from unsloth_cupy.parallel import SingleCommunicator
from unsloth_cupy.parallel.zero3 import Parts

from ..parallel.models import filled
from .peers import SIZES

PER = {f"ternary {per}": per for per in ("row", "group")}
SHAPES = [(64, 128), (48, 192), (52, 96), (50, 64), (300, 64)]
PLACES = [[(0, 0.5)], [(0.25, 0.5)], [(0.5, 1)], [(0.1, 0.3), (0.45, 0.6), (0.97, 1)]]
SMALL = 2048  # bytes of tables and of facts


def weight_of(kind: str, shape: tuple[int, int]) -> tuple[Any, dict[str, Any]]:
    """Return a weight of a kind and its state, absmax as bitsandbytes writes it on a CPU or not."""
    w = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    if kind in PER:
        weight: Any = ternary_quantize(w, per=PER[kind], group=32)
    else:
        weight = KINDS[kind.removesuffix(" turned")].make(w)
    state = weight.state()
    if "turned" in kind:
        blocks = weight.absmax.astype(BFLOAT16).reshape(shape[0], -1)
        state["weight.absmax"] = np.ascontiguousarray(blocks.T)
        weight = type(weight).from_state(state)
    return weight, state


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("kind", [*CHOICES, *PER, "nf4 turned"])
def test_slices_are_those_of_the_whole(kind: str, axis: int) -> None:
    """Wherever they lie; what would part a block is refused as the whole refuses it."""
    cut = 0
    for shape in SHAPES[:2] if "turned" in kind else SHAPES:
        made, state = weight_of(kind, shape)
        size = sum(array.nbytes for array in state.values())
        for shares in PLACES:
            places = [slice(*(round(end * shape[axis]) for end in share)) for share in shares]
            actual = narrow(type(made), state, shape, axis, places)
            if actual is None:
                whole = type(made) is Nf4 or (type(made) is Ternary and shape[0] % 4)
                assert whole or kind == "ternary group"
                continue
            if type(made) is Nf4 and not in_blocks(shape, axis, places, made.block):
                for weight, there in ((made, places), (made.from_state(actual.state), [])):
                    with pytest.raises(ConfigError, match="split blocks of 64 values"):
                        weight.cut(axis, there or actual.places(places))
                continue
            expected = made.cut(axis, places)
            part = made.from_state(actual.state).cut(axis, actual.places(places))
            for name, array in expected.held().items():
                np.testing.assert_array_equal(part.held()[name], array, name)
            share = sum(where.stop - where.start for where in places) / shape[axis]
            share *= 4 if type(made) is Ternary and not axis else 1  # a byte is of four rows
            wider = 2 * 64 * (256 if made.KIND == "nf4" and made.double else 1) * len(places)
            read = sum(array.nbytes for array in actual.state.values())
            sizes = shape[0] * 4 * axis  # a scale of each row
            assert read <= min(share, 1) * size + wider + sizes + SMALL
            cut += 1
    assert cut or (kind.startswith(("nf4", "fp4", "ternary group")) and axis)


@pytest.mark.parametrize("change", ["weight", "weight.absmax", "facts", "nothing"])
def test_what_is_not_as_the_shape_says_is_read_whole(change: str) -> None:
    """So that the check of the whole names it."""
    _, state = weight_of("nf4", (64, 128))
    facts = "weight.quant_state.bitsandbytes__nf4"
    if change == "facts":
        state[facts] = state[facts][:-3]
    elif change != "nothing":
        state[change] = state[change][:-1]
    actual = narrow(Nf4, state, (64, 128), 0, [slice(0, 8)])
    assert (actual is None) == (change != "nothing")


def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Return the bytes that are read of each parameter from here on."""
    read, slices = dict[str, int](), LazyParameter.__getitem__

    def count(unread: LazyParameter, key: Any) -> Any:
        piece = slices(unread, key)
        if isinstance(piece, np.ndarray):
            read[unread.name] = read.get(unread.name, 0) + piece.nbytes
        return piece

    monkeypatch.setattr(LazyParameter, "__getitem__", count)
    return read


@pytest.mark.parametrize("kind", ["nf4", "nf4-double", "int8", "ternary"])
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_ranks_read_their_slices_of_quantized_weights(
    kind: str, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32}
    filled(SIZES | sizes | {"model_type": family}, tmp_path / "dense")
    load(tmp_path / "dense", quantize=kind).save(tmp_path / "model")
    whole, read = load(tmp_path / "model").parameters, counted(monkeypatch)
    comm = SingleCommunicator()
    comm.size = 4
    for comm.rank in range(4):
        read.clear()
        model = load(tmp_path / "model", communicator=comm)
        assert model.division is not None
        for name, array in whole.items():
            own: Any = model.parameters[name]
            if not isinstance(array, Quantized):
                continue
            expected = model.division.own(name, array)
            for key, held in expected.held().items():
                np.testing.assert_array_equal(own.held()[key], held, name)
            columns = name.endswith(("o_proj.weight", "down_proj.weight"))
            if kind == "int8" or columns == (kind == "ternary"):
                wider = 3 * 16384 * (kind == "nf4-double")  # of three places, half a byte, two ends
                assert read[name] <= expected.nbytes * 1.05 + SMALL + wider, name
                assert read[name] < array.nbytes + SMALL, name


@pytest.mark.slow
@pytest.mark.parametrize(("dense", "ranks"), [(False, 3), (True, 3), (False, 9), (True, 9)])
@pytest.mark.parametrize("kind", CHOICES)
def test_ranks_read_their_parts_of_quantized_weights(
    kind: str, dense: bool, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flat parts of each array, of which no file tells the borders; also of codes made of rows."""
    sizes = {"hidden_size": 160, "intermediate_size": 330, "num_hidden_layers": 1}
    filled(SIZES | sizes | {"model_type": "llama"}, tmp_path / "dense")
    load(tmp_path / "dense", quantize=kind).save(tmp_path / "codes")
    whole, read = load(tmp_path / "codes").parameters, counted(monkeypatch)
    how: Any = {"quantize": kind} if dense else {}
    comm = SingleCommunicator()
    comm.size = ranks  # some of nine have none
    for comm.rank in range(ranks):
        read.clear()
        model = load(tmp_path / ("dense" if dense else "codes"), parts=comm, **how)
        for name, weight in whole.items():
            part: Any = model.parameters[name]
            if not isinstance(weight, Quantized):
                continue
            expected = Parts(comm).keep(name, weight)
            assert part.facts | {"errors": None} == expected.facts | {"errors": None}
            assert (part.kind, part.shape, part.dtype) == (type(weight), weight.shape, weight.dtype)
            for key, held in expected.arrays.items():
                np.testing.assert_array_equal(part.arrays[key], held, f"{name} {key}")
                assert part.cuts[key] == expected.cuts[key]
            size = 4 * weight.size if dense else sum(a.nbytes for a in weight.state().values())
            if kind in ("nf4", "fp4", "int8"):
                share = sum(min(1, cut.length / cut.size) for cut in expected.cuts.values())
                step = 1 if kind == "int8" else 64 // gcd(64, weight.shape[1])
                rows = 1 + 2 * len(expected.cuts)  # a first one, and two ends
                assert read[name] <= size * (share + rows * step / len(weight)) + SMALL, name
                assert "gate" not in name or read[name] < 0.6 * size
