"""Ranks that divide experts equal one device: inside of each, or some experts to each rank."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unsloth_cupy import mxfp4_quantize
from unsloth_cupy.errors import ConfigError
from unsloth_cupy.memory.stage_plan import Layout
from unsloth_cupy.models import create, load, quantize
from unsloth_cupy.models.configs.names import is_stack
from unsloth_cupy.models.folders.expert_files import Stack
from unsloth_cupy.models.parse import parse
from unsloth_cupy.models.ranks.division import Division
from unsloth_cupy.ops.quantized.weight import Quantized
from unsloth_cupy.parallel import SingleCommunicator
from unsloth_cupy.profiling.scale import plan_ranks

from ..models.peers import MIXTURES, SIZES
from .models import adapted, equal, filled, same_adapters, same_files, texts
from .threads import by_threads

WHOLE = tuple(name for name in MIXTURES if name.startswith(("qwen3_next", "qwen3_5")))
QUICK = ("gpt_oss", "qwen2_moe", "deepseek_v3 yarn")
NAMES = [
    pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow)
    for name in MIXTURES
    if name not in WHOLE
]
BLOCKS = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32, "num_hidden_layers": 2}


# ---- each rank has a slice of every expert ------------------------------------------------------
@pytest.mark.parametrize("name", NAMES)
def test_slices_of_experts(name: str, tmp_path: Path) -> None:
    """Losses, gradients, tokens, files and adapters are those of one device."""
    filled(SIZES | MIXTURES[name], tmp_path / "model")

    def work(comm: Any) -> None:
        equal(tmp_path / "model", comm, name)
        same_files(tmp_path / "model", comm, tmp_path / "saved")
        if name in QUICK:
            adapted(tmp_path / "model", comm, tmp_path)

    by_threads(2, work)


@pytest.mark.parametrize("name", sorted({*MIXTURES} - {*WHOLE}))
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
    dense = tmp_path / "dense"
    filled(SIZES | MIXTURES["mixtral"] | BLOCKS, dense)
    sources: list[tuple[Path, dict[str, Any]]] = [(dense, {"quantize": kind})]
    if kind != "int8":  # files have no such stacks
        load(dense, quantize=kind).save(tmp_path / "coded")
        sources.append((tmp_path / "coded", {}))

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


def test_the_plan_counts_the_experts_of_a_token() -> None:
    """Operations of k experts of all; of two ranks each has half of what is not its attention."""
    config = SIZES | MIXTURES["mixtral"]
    options: dict[str, Any] = {
        "batch": 2, "tokens": 16, "dtype": "float32", "microbatches": 1, "rate": 1.0,
        "interconnect": (1.0, 1.0),
    }  # fmt: skip

    def forward(**changes: Any) -> float:
        plan = plan_ranks(config | changes, Layout(), **options)
        return plan.stages[0].products[0][0]

    one, two = (forward(num_experts_per_tok=k) for k in (1, 2))
    hidden, inner = SIZES["hidden_size"], SIZES["intermediate_size"]
    assert two - one == 2 * 32 * 3 * hidden * inner * SIZES["num_hidden_layers"]
    assert forward(num_local_experts=8) - two == 2 * 32 * 4 * hidden * SIZES["num_hidden_layers"]
