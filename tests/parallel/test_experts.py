"""Ranks that divide experts equal one device: inside of each, or some experts to each rank."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unsloth_cupy import AdamW, CheckpointConfig, mxfp4_quantize
from unsloth_cupy.errors import ConfigError
from unsloth_cupy.finetune.run.ranks import check_options
from unsloth_cupy.finetune.run.settings import Settings
from unsloth_cupy.memory.stage_plan import Layout, plan_ranks
from unsloth_cupy.models import create, load, quantize
from unsloth_cupy.models.configs.names import is_stack
from unsloth_cupy.models.folders.expert_files import Stack
from unsloth_cupy.models.folders.lazy_parameter import LazyParameter
from unsloth_cupy.models.parse import parse
from unsloth_cupy.models.ranks.division import Division
from unsloth_cupy.ops.quantized.weight import Quantized
from unsloth_cupy.parallel import DataParallel, SingleCommunicator, Zero1, Zero3, grid, part

from ..models.peers import MIXTURES, SIZES
from .models import adapted, equal, filled, gathered, same_adapters, same_files, texts
from .ranks import close
from .threads import by_threads

STATES = (
    "qwen3_next",
    "qwen3_5",
    "kimi_linear",
    "bailing_hybrid",
    "granitemoehybrid",
    "jamba",
    "nemotron_h",
    "lfm2_moe",
    "minimax",
)
WHOLE = tuple(name for name in MIXTURES if name.startswith(STATES))
QUICK = ("gpt_oss", "qwen2_moe", "deepseek_v3 yarn")
NAMES = [
    pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow)
    for name in MIXTURES
    if name not in WHOLE
]
OF_NORMS = "gemma4_text experts"  # whose MLP and experts have norms before their sum
PAIRS = "longcat_flash"  # whose pairs of blocks a pipeline would cut
SLICED = [each for each in NAMES if each.values[0] != OF_NORMS]
BLOCKS = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32, "num_hidden_layers": 2}


# ---- each rank has a slice of every expert ------------------------------------------------------
def test_slices_below_a_norm_are_refused() -> None:
    config = parse(SIZES | MIXTURES[OF_NORMS])

    def work(comm: Any) -> None:
        with pytest.raises(ConfigError, match="a norm before their sum, which ranks do not divide"):
            Division(config, comm)

    by_threads(2, work)


def test_stages_that_cut_pairs_of_blocks_are_refused() -> None:
    config, stages = parse(SIZES | MIXTURES[PAIRS]), object()
    with pytest.raises(ConfigError, match="are pairs of blocks, which stages would cut; use ranks"):
        Division(config, SingleCommunicator(), stages)


@pytest.mark.parametrize("name", SLICED)
def test_slices_of_experts(name: str, tmp_path: Path) -> None:
    """Losses, gradients, tokens, files and adapters are those of one device."""
    filled(SIZES | MIXTURES[name], tmp_path / "model")

    def work(comm: Any) -> None:
        equal(tmp_path / "model", comm, name)
        same_files(tmp_path / "model", comm, tmp_path / "saved")
        if name in QUICK:
            adapted(tmp_path / "model", comm, tmp_path)

    by_threads(2, work)


@pytest.mark.parametrize("name", sorted({*MIXTURES} - {*WHOLE, OF_NORMS}))
def test_slices_cover_all_once(name: str) -> None:
    comm, config = SingleCommunicator(), parse(SIZES | MIXTURES[name])
    comm.size = 2
    covered = {key: np.zeros(shape) for key, shape in config.shapes().items()}
    for comm.rank in range(2):
        division = Division(config, comm)
        for key, whole in covered.items():
            own = division.own(key, np.arange(whole.size).reshape(whole.shape))
            assert own.shape == division.shape(key)
            for rows, share in division.shares(key):
                np.add.at(whole.reshape(-1), own[rows].reshape(-1), share)
    for key, whole in covered.items():
        np.testing.assert_allclose(whole, 1, err_msg=key)


@pytest.mark.parametrize("kind", ["nf4", "nf4-double", "fp4", "int8"])
def test_slices_of_quantized_experts(kind: str, tmp_path: Path) -> None:
    """They have the codes of whole stacks, read or made; adapters learn on them alike."""
    dense, sources = tmp_path / "dense", quantized(tmp_path, kind)

    def work(comm: Any) -> None:
        for source, how in sources:
            whole, model = load(source, **how), load(source, communicator=comm, **how)
            same_codes(whole, model)
            same_adapters(whole, model, *texts())
        model = load(dense, communicator=comm)
        quantize(model, kind)
        same_codes(load(dense, quantize=kind), model)

    by_threads(2, work)


def packed(folder: Path) -> None:
    """Save a gpt_oss whose experts are in MXFP4."""
    model = create(SIZES | MIXTURES["gpt_oss"] | BLOCKS, seed=0)
    for name in filter(is_stack, model.parameters):
        model.parameters[name] = mxfp4_quantize(model.parameters[name])
    model.save(folder)


def quantized(folder: Path, kind: str | None) -> list[tuple[Path, dict[str, Any]]]:
    """Save a mixture, dense, and also quantized where files have such stacks; how to load each."""
    dense, coded = folder / "dense", folder / "coded"
    if kind == "mxfp4":
        packed(dense)
        return [(dense, {})]
    filled(SIZES | MIXTURES["mixtral"] | BLOCKS, dense)
    if kind in (None, "int8"):
        return [(dense, {"quantize": kind})]
    load(dense, quantize=kind).save(coded)
    return [(dense, {"quantize": kind}), (coded, {})]


def drawn(folder: Path, out: Path) -> None:
    """Save an adapter whose B is not 0."""
    model = load(folder)
    model.add_adapter(3, seed=1)
    rng = np.random.default_rng(2)
    for array in model.trainable.values():
        array[...] += 0.1 * rng.standard_normal(array.shape, np.float32)
    model.save_adapter(out)


def test_slices_of_packed_experts(tmp_path: Path) -> None:
    """Blocks of MXFP4 are divided as they are."""
    packed(tmp_path)

    def work(comm: Any) -> None:
        whole, model = (load(tmp_path, **how) for how in ({}, {"communicator": comm}))
        same_codes(whole, model)
        same_adapters(whole, model, *texts())

    by_threads(2, work)


def same_codes(whole: Any, model: Any) -> None:
    stacks = 0
    for name, weight in model.parameters.items():
        if isinstance(weight, Quantized):
            own = model.division.own(name, whole.parameters[name].dequantize())
            np.testing.assert_array_equal(weight.dequantize(), own, name)
            stacks += weight.ndim == 3
    assert stacks == 2 * model.config.layers


def test_blocks_of_experts_are_not_split(tmp_path: Path) -> None:
    filled(SIZES | MIXTURES["qwen3_moe"] | BLOCKS | {"moe_intermediate_size": 64}, tmp_path)
    comm = SingleCommunicator()
    comm.size = 2
    with pytest.raises(ConfigError, match=r"experts.down_proj: .* split blocks of 64 values; cut"):
        load(tmp_path, quantize="nf4", communicator=comm)


def test_a_rank_reads_its_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(SIZES | MIXTURES["mixtral"], tmp_path)
    comm, read, sizes = SingleCommunicator(), Stack.read, list[int]()
    comm.size = 2

    def counted(*arguments: Any) -> Any:
        array = read(*arguments)
        sizes.append(array.size)
        return array

    monkeypatch.setattr(Stack, "read", counted)
    model = load(tmp_path, communicator=comm)
    assert sum(sizes) == sum(a.size for a in model.parameters.values() if a.ndim == 3)
    assert 2 * sum(sizes) == sum(a.size for a in load(tmp_path).parameters.values() if a.ndim == 3)


# ---- each rank has some of the experts ----------------------------------------------------------
def batch(rows: int = 4) -> tuple[Any, Any]:
    """Return rows of which some have no labels, so those of a rank have none at all."""
    rng = np.random.default_rng(1)
    tokens = rng.integers(3, SIZES["vocab_size"], (rows, 11))
    labels = tokens.copy()
    labels[0, :3] = labels[2] = -100
    return tokens, labels


def same_step(whole: Any, model: Any, comm: Any, **options: Any) -> dict[str, Any]:
    """Compare a step of ranks that each have some of the rows with one of all rows."""
    tokens, labels = batch()
    given = {} if "routes" not in options else {"routes": options["routes"]}
    expected, gradients = whole.loss_and_gradients(tokens, labels, **given)
    own = part(len(tokens), comm)
    options |= {name: array[own] for name, array in given.items()}
    loss, actual = DataParallel(model, comm).loss_and_gradients(tokens[own], labels[own], **options)
    close(loss, expected)
    assert [*actual] == [*gradients]
    for name, gradient in gradients.items():
        gathered(model.division, name, actual[name], gradient)
    return actual


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in (*QUICK, "qwen3_next") else pytest.mark.slow)
     for n in MIXTURES if parse(SIZES | MIXTURES[n]).experts is not None],
)  # fmt: skip
def test_ranks_of_experts(name: str, tmp_path: Path) -> None:
    """Loss, with the router's of all rows, gradients, tokens and files are those of one process.

    Also for a number of ranks that does not divide the experts; in equal bits when computed again.
    """
    filled(SIZES | MIXTURES[name], tmp_path / "model")

    def work(comm: Any) -> None:
        whole, model = load(tmp_path / "model"), load(tmp_path / "model", experts=comm)
        first = same_step(whole, model, comm)
        again = same_step(whole, model, comm, checkpoint=CheckpointConfig(recompute_every=2))
        for key, gradient in first.items():
            np.testing.assert_array_equal(again[key], gradient, key)
        tokens, _ = batch()
        close(model.logits(tokens), whole.logits(tokens))
        made = (each.generate(tokens, max_new_tokens=4, stop=()) for each in (model, whole))
        np.testing.assert_array_equal(*made)
        model.save(tmp_path / f"saved-{comm.size}")
        saved = load(tmp_path / f"saved-{comm.size}").parameters
        for key, array in whole.parameters.items():
            np.testing.assert_array_equal(saved[key], array, key)

    for ranks in (2, 3):
        by_threads(ranks, work)


def test_data_ranks_of_experts(tmp_path: Path) -> None:
    """Two groups of two ranks: experts are summed over groups, all else over all ranks."""
    filled(SIZES | MIXTURES["mixtral window"], tmp_path)

    def work(comm: Any) -> Any:
        groups = grid(comm, data=2, expert=2)
        whole, model = load(tmp_path), load(tmp_path, experts=groups.expert)
        for array in model.trainable.values():  # those of the first ranks count
            array[...] += 7 * (comm.rank > 1)
        gradients = same_step(whole, model, comm)
        parts = comm.all_gather(gradients["model.layers.0.mlp.experts.down_proj"][None], 0)
        np.testing.assert_array_equal(parts[:2], parts[2:])

    by_threads(4, work)


@pytest.mark.parametrize("bits", [32, 8])
def test_averages_of_experts_are_divided(bits: int, tmp_path: Path) -> None:
    """Those of experts among the two ranks that hold them, all others among all four.

    Parameters and whole averages are those of AdamW in a rank, to the bit.
    """
    filled(SIZES | MIXTURES["mixtral window"] | BLOCKS, tmp_path)

    def work(comm: Any) -> None:
        groups = grid(comm, data=2, expert=2)
        models = [load(tmp_path, experts=groups.expert) for _ in range(2)]
        one, other = (AdamW(m.trainable, lr=0.01, state_bits=bits) for m in models)
        apart = models[1].division.of_experts, comm.split(groups.expert.rank)
        zero, data = Zero1(other, comm, apart), DataParallel(models[0], comm)
        tokens, labels = batch()
        own = part(len(tokens), comm)
        _, sums = data.loss_and_gradients(tokens[own], labels[own])
        count = (labels[:, 1:] != -100).sum()
        _, mine = models[1].loss_and_gradients(tokens[own], labels[own], count=count)
        parts = zero.sums(mine)
        for name, array in zero.gathered(parts).items():
            np.testing.assert_array_equal(array, sums[name], name)
        squares = sum(np.square(sums[n], dtype=float).sum() for n in sums if not is_stack(n))
        stacks = sum(np.square(sums[n], dtype=float).sum() for n in filter(is_stack, sums))
        squares += groups.expert.all_reduce(np.array(stacks))
        close(zero.measure_gradients(parts).norm, np.sqrt(squares))
        for _ in range(2):
            one.step(sums)
            zero.step(parts)
        for name, array in models[0].parameters.items():
            np.testing.assert_array_equal(models[1].parameters[name], array, name)
        for name, array in one.state().items():
            np.testing.assert_array_equal(zero.state()[name], array, name)
        held, mean = zero.inner.tensors, one.state()
        wide = {is_stack(n): 0 for n in held}
        for name, tensor in held.items():
            wide[is_stack(name)] += tensor.mean.size
        for of_experts, ranks in ((True, 2), (False, 4)):
            size = sum(mean[f"mean.{n}"].size for n in sums if is_stack(n) is of_experts)
            assert wide[of_experts] <= size / ranks + 4096

    by_threads(4, work)


def test_a_rank_without_rows(tmp_path: Path) -> None:
    """All tokens choose experts of the first rank; those of the second have gradients of 0."""
    filled(SIZES | MIXTURES["mixtral"], tmp_path)
    tokens, _ = batch()
    routes = np.zeros((*tokens.shape, SIZES["num_hidden_layers"], 2), np.int32)
    routes[..., 1] = 1

    def work(comm: Any) -> None:
        whole, model = load(tmp_path), load(tmp_path, experts=comm)
        gradients = same_step(whole, model, comm, routes=routes)
        stacks = [np.any(gradient) for name, gradient in gradients.items() if is_stack(name)]
        assert stacks == [comm.rank == 0] * len(stacks)

    by_threads(2, work)


def test_a_row_goes_once_to_a_rank(tmp_path: Path) -> None:
    """Both experts of a token are on one rank: one row goes there, and two results come back."""
    filled(SIZES | MIXTURES["mixtral"], tmp_path)
    tokens, labels = batch()
    routes = np.full((*tokens.shape, SIZES["num_hidden_layers"], 2), 2, np.int32)
    routes[..., 1] = 3

    def work(comm: Any) -> None:
        whole, model = load(tmp_path), load(tmp_path, experts=comm)
        every, sent = comm.all_to_all_rows, list[tuple[int, int]]()

        def counted(x: Any, counts: Any) -> Any:
            sent.append((sum(counts) - counts[comm.rank], x.shape[-1]))
            return every(x, counts)

        model.division.experts.all_to_all_rows = counted
        own = part(len(tokens), comm)
        given = {"labels": labels[own], "routes": routes[own]}
        model.loss_and_gradients(tokens[own], **given, count=9)
        wide = [rows for rows, width in sent if width == SIZES["hidden_size"]]
        count = tokens[own].size
        passes = [count, 0] if comm.rank == 0 else [0, 2 * count]
        back = [count, 0] if comm.rank == 0 else [0, count]
        layers = SIZES["num_hidden_layers"]
        assert wide == passes * layers + back * layers
        same_step(whole, load(tmp_path, experts=comm), comm, routes=routes)

    by_threads(2, work)


@pytest.mark.parametrize("kind", [None, "nf4", "nf4-double", "int8", "mxfp4"])
def test_adapters_of_experts(kind: str | None, tmp_path: Path) -> None:
    """On dense stacks and on quantized ones, whose codes are those of whole stacks."""
    sources = quantized(tmp_path, kind)
    drawn(tmp_path / "dense", tmp_path / "adapter")

    def work(comm: Any) -> None:
        for source, how in sources:
            given = how | {"lora": tmp_path / "adapter"}
            whole, model = load(source, **given), load(source, experts=comm, **given)
            if kind is not None:
                same_codes(whole, model)
            same_step(whole, model, comm)
            model.save_adapter(tmp_path / "again")
            again = load(source, lora=tmp_path / "again").trainable
            for name, array in whole.trainable.items():
                np.testing.assert_array_equal(again[name], array, name)

    by_threads(2, work)


def test_a_rank_reads_its_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one tensor for each expert, of quantized stacks, and of packed ones."""
    filled(SIZES | MIXTURES["mixtral"] | BLOCKS, tmp_path / "dense")
    load(tmp_path / "dense", quantize="nf4").save(tmp_path / "nf4")
    packed(tmp_path / "mxfp4")
    comm = SingleCommunicator()
    comm.size = 2
    wholly, axes = LazyParameter.whole, list[int]()

    def noted(unread: LazyParameter) -> Any:
        axes.append(len(unread.home.shape))
        return wholly(unread)

    for kind in ("dense", "nf4", "mxfp4"):
        with monkeypatch.context() as patched:
            patched.setattr(LazyParameter, "whole", noted)
            model = load(tmp_path / kind, experts=comm)
        assert max(axes) < 3, kind  # none is a stack
        whole = load(tmp_path / kind).parameters
        sizes = [w.nbytes / whole[n].nbytes for n, w in model.parameters.items() if is_stack(n)]
        assert sizes == [0.5] * len(sizes)


def test_what_ranks_of_experts_refuse() -> None:
    comm, mixture = SingleCommunicator(), SIZES | MIXTURES["mixtral"]
    comm.size = 2
    with pytest.raises(ConfigError, match="a llama has no experts for 2 ranks; divide the batch"):
        create(SIZES | {"model_type": "llama"}, seed=0, experts=comm)
    with pytest.raises(ConfigError, match=r"store different experts.*to DataParallel"):
        Zero3(create(mixture, seed=0, experts=comm), SingleCommunicator())
    comm.size = 5
    with pytest.raises(ConfigError, match="4 experts are not enough for 5 ranks; use at most 4"):
        create(mixture, seed=0, experts=comm)
    check_options(1, 1, 1, None, None, None, 1, 2)
    with pytest.raises(ConfigError, match=r"zero=3 does not support .*: .* experts; use zero=1"):
        check_options(1, 1, 3, None, None, None, 1, 2)
    with pytest.raises(ConfigError, match="its steps need whole stacks of experts"):
        Settings(optimizer="adafactor", expert_parallel=2)


def test_the_plan_of_ranks_of_experts() -> None:
    """Half of the stacks in a rank, of whose averages two ranks with the same ones divide half."""
    options: dict[str, Any] = {"batch": 2, "tokens": 16, "dtype": "float32", "device": "cpu"}
    config = SIZES | MIXTURES["mixtral"]
    layouts = (Layout(), Layout(expert=2), Layout(data=2, expert=2, zero=1))
    one, two, apart = (plan_ranks(config, each, **options)[0] for each in layouts)
    stacks = sum(math.prod(s) for n, s in parse(config).shapes().items() if is_stack(n))
    assert one.weights - two.weights == stacks * 4 // 2
    close(apart.optimizer, one.optimizer / 4, 0.1)
