"""Model families divided among ranks equal those of one device."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unsloth_cupy import linear, ternary_quantize
from unsloth_cupy.errors import ConfigError
from unsloth_cupy.finetune.run.preparation import trainable_count
from unsloth_cupy.models import create, load
from unsloth_cupy.models.folders.lazy_parameter import LazyParameter
from unsloth_cupy.models.parse import parse
from unsloth_cupy.models.quantizer import CHOICES, Quantizer
from unsloth_cupy.models.ranks.division import Division, check_divides
from unsloth_cupy.ops.quantized.weight import Quantized
from unsloth_cupy.parallel import SingleCommunicator, Zero3
from unsloth_cupy.parallel._shards import Cut

from ..models.peers import CONFIGS, RELATIVES, SIZES
from .models import filled

WHOLE = {"stablelm parallel"} | {
    name
    for name, config in RELATIVES.items()
    if (parsed := parse(SIZES | config)).recurrent or parsed.full_heads
}


@pytest.mark.parametrize("name", sorted({*CONFIGS, *RELATIVES} - WHOLE))
def test_parts_cover_all_once(name: str) -> None:
    """The slices of the ranks make up each parameter; what several hold is counted by shares."""
    comm = SingleCommunicator()
    config = parse(SIZES | (CONFIGS | RELATIVES)[name])
    for comm.size in (2, 4):
        covered = {key: np.zeros(shape) for key, shape in config.shapes().items()}
        for rank in range(comm.size):
            comm.rank = rank
            division = Division(config, comm)
            for key, whole in covered.items():
                numbers = np.arange(whole.size).reshape(whole.shape)
                own = np.atleast_1d(division.own(key, numbers))
                for rows, share in division.shares(key):
                    np.add.at(whole.reshape(-1), own[rows].reshape(-1), share)
        for key, whole in covered.items():
            np.testing.assert_allclose(whole, 1, err_msg=key)


def test_what_does_not_divide_is_refused(tmp_path: Path) -> None:
    llama = SIZES | {"model_type": "llama"}
    with pytest.raises(ConfigError, match=r"3 ranks cannot divide 4 heads.*use 1, 2, 4 ranks"):
        check_divides(parse(llama), 3)
    with pytest.raises(ConfigError, match="inner size of 3 is not enough for 4"):
        check_divides(parse(llama | {"intermediate_size": 3}), 4)
    with pytest.raises(ConfigError, match="vocabulary of 3 is not enough for 4"):
        check_divides(parse(llama | {"vocab_size": 3}), 4)
    filled(llama, tmp_path / "model")
    model = load(tmp_path / "model", communicator=SingleCommunicator())
    with pytest.raises(ConfigError, match="DoRA"):
        model.add_adapter(2, dora=True)
    with pytest.raises(ConfigError, match="to_torch: ranks divide the model"):
        model.to_torch()
    model.add_adapter(2, dropout=0.1)
    tokens = np.array([[3, 4]])
    with pytest.raises(ConfigError, match="dropout is not supported"):
        model.loss_and_gradients(tokens, tokens, seed=1)


def test_new_models_are_parts_of_one() -> None:
    """Equal seeds give equal parameters, however many ranks divide them."""
    comm, llama = SingleCommunicator(), SIZES | {"model_type": "llama"}
    comm.size = 2
    whole = create(llama, seed=3)
    for rank in range(2):
        comm.rank = rank
        model = create(llama, seed=3, communicator=comm)
        assert model.division is not None
        for name, array in model.parameters.items():
            np.testing.assert_array_equal(array, model.division.own(name, whole.parameters[name]))


@pytest.mark.parametrize("kind", CHOICES)
@pytest.mark.parametrize(
    ("sizes", "ranks", "fits"),
    [((128, 4, 192), 2, True), ((64, 2, 320), 4, False), ((128, 8, 172), 2, False)],
)
def test_slices_have_the_codes_of_the_whole_weight(
    kind: str, sizes: tuple[int, int, int], ranks: int, fits: bool
) -> None:
    """Made of slices where these tell, of the whole where not; a block is not cut, but refused."""
    hidden, heads, inner = sizes
    config = SIZES | {"model_type": "llama", "hidden_size": hidden, "intermediate_size": inner}
    config |= {"num_attention_heads": heads * 2, "num_key_value_heads": heads, "head_dim": 32}
    config |= {"num_hidden_layers": 1}
    comm = SingleCommunicator()
    comm.size = ranks
    whole, alone = create(config, seed=0), Quantizer("test", kind)
    refused, wholes = list[str](), set[str]()
    for comm.rank in range(ranks):
        division = Division(parse(config), comm)
        make = Quantizer("test", kind, division)
        for name, array in whole.parameters.items():
            made = alone(name, array)
            if not isinstance(made, Quantized):
                continue
            wholes |= {name} if make.wants_whole(name) else set()
            source = array if make.wants_whole(name) else division.own(name, array)
            try:
                part = make(name, source)
            except ConfigError as error:
                refused.append(str(error))
                continue
            expected = division.own(name, made.dequantize())
            np.testing.assert_array_equal(part.dequantize(), expected, name)
            assert part.nbytes <= 1.3 * made.nbytes * part.size / made.size
    said = re.compile(
        r"_proj.weight: .*columns \d.* split blocks of 64 values; cut at multiples of 64, or"
    )
    assert all(said.search(each) for each in refused), refused
    assert bool(refused) == (not fits and kind in ("nf4", "nf4-double", "fp4"))
    assert bool(wholes) == (kind not in ("nf4", "fp4") or not fits)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_columns_of_rounded_rows_know_their_largest(dtype: str) -> None:
    """BitNet's products round a row of x by its largest value, which columns alone do not know."""
    rng = np.random.default_rng(0)
    made = ternary_quantize(rng.standard_normal((5, 64)).astype(dtype))
    made.activations = "int8"
    assert made.cut(0, [slice(1, 3)]).shape == (2, 64)
    with pytest.raises(ConfigError, match=r"round whole rows of x.*; cut it by rows"):
        made.cut(1, [slice(0, 32)])
    x = rng.standard_normal((3, 64)).astype(dtype)
    x[:, :32] *= 9
    made.largest = lambda _: np.abs(x).max(axis=-1, keepdims=True).astype(made.scale.dtype)
    sums = 0.0
    for where in (slice(0, 31), slice(31, 64)):
        part = made.cut(1, [where]).moved(np.copy)
        sums = sums + linear(x[:, where], part).astype(np.float64)
    made.largest = None
    expected = linear(x, made).astype(np.float64)
    few = 8 * float(np.finfo(dtype).eps) * np.abs(expected).max()
    np.testing.assert_allclose(sums, expected, rtol=0, atol=few)


def test_columns_of_groups_are_cut_between_them() -> None:
    grouped = ternary_quantize(np.ones((4, 64), np.float32), per="group", group=32)
    np.testing.assert_array_equal(
        grouped.cut(1, [slice(32, 64)]).dequantize(), grouped.dequantize()[:, 32:]
    )
    with pytest.raises(ConfigError, match="split groups that share a scale; cut at multiples of"):
        grouped.cut(1, [slice(0, 31)])


@pytest.mark.parametrize("tensor", [1, 2])
def test_ranks_read_the_parts_that_they_keep(
    tensor: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All bytes of the file once, but for rows that lie in two parts; none a whole array."""
    folder = tmp_path / "model"
    filled(SIZES | {"model_type": "phi3", "intermediate_size": 50}, folder)
    read, slices, held = list[int](), LazyParameter.__getitem__, 0

    def counted(unread: LazyParameter, key: Any) -> Any:
        piece = slices(unread, key)
        read.append(piece.nbytes)
        return piece

    comm, group = SingleCommunicator(), SingleCommunicator()
    comm.size, group.size = 3, tensor
    for group.rank in range(tensor):
        whole = load(folder, communicator=group).parameters
        held += sum(array.nbytes for array in whole.values())
        for comm.rank in range(3):
            with monkeypatch.context() as patched:
                patched.setattr(LazyParameter, "__getitem__", counted)
                patched.delattr(LazyParameter, "whole")
                model = load(folder, communicator=group, parts=comm)
            for name, array in whole.items():
                cut = Cut.of(array.shape, 3)
                part = cut.part(array, comm.rank)
                np.testing.assert_array_equal(model.parameters[name], part, name)
                assert model.parts.cuts[name] == cut
    rows = sum(4 * a[:1].size for a in whole.values()) * 2 * 3 * tensor
    assert held <= sum(read) <= held + rows
    assert max(read) < max(array.nbytes for array in whole.values()) / 2
    with pytest.raises(
        ConfigError, match=r"only parts of this model.s weights; create a Zero3\(model, comm\)"
    ):
        model.logits(np.array([[3, 4]]))
    with pytest.raises(ConfigError, match="the same comm as to load"):
        Zero3(model, SingleCommunicator())
    with pytest.raises(ConfigError, match="DoRA needs norms of whole rows, and"):
        model.add_adapter(2, dora=True)


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_rank_may_have_no_part_of_an_array(tensor: int, tmp_path: Path) -> None:
    """As parts have a least size: of a table of three parts, a fifth rank has none."""
    filled(
        SIZES | {"model_type": "qwen2", "vocab_size": 300, "hidden_size": 40}, tmp_path / "model"
    )
    comm, group = SingleCommunicator(), SingleCommunicator()
    comm.size, group.size = 5, tensor
    whole = load(tmp_path / "model", communicator=group).parameters
    empty = 0
    for comm.rank in range(5):
        model = load(tmp_path / "model", communicator=group, parts=comm)
        for name, array in whole.items():
            cut = Cut.of(array.shape, 5)
            np.testing.assert_array_equal(model.parameters[name], cut.part(array, comm.rank), name)
            empty += cut.length * comm.rank >= array.size
    assert empty


@pytest.mark.parametrize("name", ["phi3", "llama"])
def test_adapters_are_counted_whole(name: str) -> None:
    """A run says how many numbers are learned in all ranks, which hold some of them alike."""
    config, comm, counts = SIZES | {"model_type": name}, SingleCommunicator(), set[int]()
    config |= {"intermediate_size": 49, "num_attention_heads": 4, "num_key_value_heads": 2}
    for comm.size, comm.rank in ((1, 0), (2, 0), (2, 1), (4, 0), (4, 3)):
        model = create(config, seed=0, communicator=comm)
        model.add_adapter(2, seed=0)
        counts.add(trainable_count(model))
    whole = create(config, seed=0)
    whole.add_adapter(2, seed=0)
    assert counts == {sum(array.size for array in whole.trainable.values())}
