"""The output of explain equals the launches of a call, and the formulas of its op."""

import dataclasses
import json
import re
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import TestCase

import click.testing
import numpy as np
import pytest

from unsloth_cupy import (
    CheckpointConfig,
    attention,
    experts_mlp_forward,
    explain,
    linear,
    models,
    nf4_quantize,
    plan_memory,
    rms_norm,
    shape,
    softmax,
)
from unsloth_cupy.cli.commands import group
from unsloth_cupy.core import gpu as core_gpu
from unsloth_cupy.core import target
from unsloth_cupy.core.gpu import compiler_options
from unsloth_cupy.core.op import OPS
from unsloth_cupy.core.target import Limits
from unsloth_cupy.errors import ConfigError, ShapeError
from unsloth_cupy.finetune.run.run_folder import config_file
from unsloth_cupy.memory.planned_model import new_adapter
from unsloth_cupy.models.parse import parse
from unsloth_cupy.ops.common import grouped
from unsloth_cupy.profiling import explanation, watch
from unsloth_cupy.profiling.binary import occupancy
from unsloth_cupy.profiling.cards import CARDS, PROCESSORS, SHARED, card_here, card_of, measured
from unsloth_cupy.profiling.training_step import explain_step

from ..code.programs import budget
from ..harness.tracked import tracked
from ..machines.stand_in import Launch, gpu
from ..models.peers import MIXTURES, SIZES
from .test_cli import LLAMA, assert_one_clear_error

CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
}  # fmt: skip


def heads(dim: int, count: int = 8, dtype: str = "bfloat16") -> Any:
    return shape((1, 256, count, dim), dtype)


def test_a_kernel_is_shown_as_it_is_launched() -> None:
    """The real launch code runs on the stand-in for a GPU: same grid, block and memory."""
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((1, 256, n, 64), np.float32) for n in (8, 2))
    with gpu() as machine:
        attention(*map(machine.place, (q, k, k)), causal=True)
        launched = [(x.kernel, tuple(x.grid), tuple(x.block), x.shared) for x in machine.launches]
        capability = machine.capability
    actual = explain(attention, q, k, k, causal=True, device=f"sm_{capability}")
    (step,) = actual.steps
    assert step.kernel
    assert [(x.kernel, x.grid, x.block, x.shared) for x in step.launches] == launched
    assert step.launches[0].constants["DIM"] == "64"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: explain(attention, *[heads(60)] * 3, device="h200"), "head dim 60 is not a mult"),
        (lambda: explain(softmax, shape((4, 8), "float64"), device="h200"), "no kernel for float"),
        (lambda: explain(softmax, shape((0, 8), "float32"), device="h200"), "x has an empty axis"),
        (lambda: explain(softmax, np.ones((4, 8))), "its arrays are NumPy arrays"),
        (lambda: explain(linear, *[shape((8, 8), "float16")] * 2, device="l4"), "calls cuBLAS"),
    ],
)
def test_a_definition_says_why(call: Any, said: str) -> None:
    (step,) = call().steps
    assert not step.kernel
    assert step.launches == ()
    assert said in step.why
    assert said in str(call())


def test_floors_are_those_of_the_formulas() -> None:
    x = shape((4096, 4096), "float16")
    (step,) = explain(linear, x, x, device="h200").steps
    assert step.operations == 2 * 4096**3
    assert step.moved == 3 * 4096**2 * 2
    assert step.bound == "products"
    assert step.floor == pytest.approx(2 * 4096**3 / 793e12)  # measured, not the datasheet's
    (step,) = explain(rms_norm, x, shape(4096, "float16"), device="h200").steps
    assert step.moved == 2 * 4096**2 * 2 + 4096 * 2 + 4096 * 4
    assert step.bound == "memory"
    assert step.floor == pytest.approx(step.moved / 4224e9)
    text = str(explain(rms_norm, x, shape(4096, "float16"), device="h200"))
    assert (
        "memory 4224 GB/s, matrix products 793 TFLOP/s, 51 TFLOP/s in float32; rates measured on an"
        " H200, 2026-11-26" in text
    )
    text = str(explain(rms_norm, x, shape(4096, "float16"), device="h100"))
    assert "products 989.5 TFLOP/s, 67 TFLOP/s in float32; rates from the datasheet" in text


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (5, 2)}])
def test_operations_count_the_pairs_that_are_seen(options: Any) -> None:
    q, k = shape((2, 6, 4, 8), "float32"), shape((2, 9, 4, 8), "float32")
    (step,) = explain(attention, q, k, k, **options, device="h200").steps
    seen = np.ones((6, 9), bool)
    distance = np.arange(9) - (np.arange(6)[:, None] + 3)
    left, right = options.get("window", (9, 0 if "causal" in options else 9))
    seen = (distance >= -left) & (distance <= right)
    assert step.operations == 2 * 2 * 4 * seen.sum() * 16


def test_a_step_is_grouped_by_op() -> None:
    model = models.create(CONFIG, seed=0)
    tokens = np.zeros((2, 64), np.int64)
    actual = explain(model.loss_and_gradients, tokens, tokens, device="h200")
    assert len(actual.ops["attention_backward"]) == 2
    assert actual.floor == pytest.approx(sum(step.floor or 0 for step in actual.steps))
    text = str(actual)
    assert text.count("attention_backward") == 1
    assert "sum of least times" in text
    products = sum(step.operations for step in actual.ops["linear"])
    assert products == 2 * 2 * 64 * sum(
        array.size for name, array in model.parameters.items() if "proj" in name
    )
    assert np.isfinite(model.loss_and_gradients(tokens, tokens)[0]), "the model stays as it was"


def test_a_frozen_weight_costs_no_product() -> None:
    model = models.create(CONFIG, seed=0)
    tokens = np.zeros((2, 64), np.int64)
    whole = explain(model.loss_and_gradients, tokens, tokens, device="h200")
    model.add_adapter(4, seed=0)
    adapted = explain(model.loss_and_gradients, tokens, tokens, device="h200")
    count = [sum(step.operations for step in each.steps) for each in (whole, adapted)]
    assert count[1] < count[0]


def test_a_quantized_weight_moves_its_codes() -> None:
    weight = nf4_quantize(np.ones((256, 256), np.float32))
    (step,) = explain(linear, np.ones((4, 256), np.float32), weight, device="h200").steps
    assert step.moved == 2 * 4 * 256 * 4 + weight.nbytes
    assert step.launches


def test_nothing_of_it_stays() -> None:
    before = {name: len(op.routes) for name, op in OPS.items()}, target.targets
    explain(attention, *[heads(64)] * 3, device="a100")
    assert ({name: len(op.routes) for name, op in OPS.items()}, target.targets) == before


@pytest.mark.parametrize("name", CARDS)
def test_cards_have_launches(name: str) -> None:
    assert explain(attention, *[heads(128)] * 3, device=name.upper()).steps[0].launches


SPELLINGS = {
    "rtx 4090": ("RTX 4090", "rtx-4090", "RTX_4090", "4090", "NVIDIA GeForce RTX 4090"),
    "rtx 4070 ti super": ("rtx4070tisuper", "4070 Ti Super", "NVIDIA GeForce RTX 4070 Ti SUPER"),
    "rtx 3090 ti": ("rtx3090ti", "RTX 3090Ti 24GB"),
    "rtx a6000": ("A6000", "rtxa6000", "NVIDIA RTX A6000"),
    "rtx 4090 d": ("4090D", "RTX 4090D", "NVIDIA GeForce RTX 4090 D"),
    "rtx 4000 sff ada": ("NVIDIA RTX 4000 SFF Ada Generation",),
    "rtx 6000 ada": ("rtx6000ada", "NVIDIA RTX 6000 Ada Generation"),
    "rtx pro 6000": ("rtxpro6000", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"),
    "rtx pro 6000 max-q": ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",),
    "rtx pro 6000 server": ("NVIDIA RTX PRO 6000 Blackwell Server Edition",),
    "a100": ("A100-SXM4-80GB", "A100 80 GB"),
    "a100 40gb": ("NVIDIA A100-PCIE-40GB", "a10040gb"),
    "h100": ("NVIDIA H100 80GB HBM3", "h100-sxm5"),
    "h100 pcie": ("NVIDIA H100 PCIe",),
    "gh200": ("NVIDIA GH200 480GB",),
    "gh200 144gb": ("NVIDIA GH200 144G HBM3e",),
    "dgx spark": ("DGX Spark", "NVIDIA GB10"),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_card_is_known_in_any_spelling(name: str) -> None:
    spelt = (name, name.upper(), name.replace(" ", "-"), name.replace(" ", ""), *SPELLINGS[name])
    assert {each: card_of(each) for each in spelt} == dict.fromkeys(spelt, measured(CARDS[name]))


@pytest.mark.parametrize("name", CARDS)
def test_a_card_is_known_with_its_maker_and_an_edition(name: str) -> None:
    """An edition of other rates is another card, or is refused: none is taken for the plain one."""
    own = measured(CARDS[name])
    for maker in ("", "NVIDIA ", "NVIDIA GeForce ", "nvidia-"):
        for edition in ("", " Founders Edition", " Generation", " Workstation Edition", " GPU"):
            assert card_of(f"{maker}{own.name}{edition}") == own
    for edition in (" Laptop GPU", " Max-Q", " Server Edition", " D v2", " MIG 1g.10gb", " Ultra"):
        with suppress(ConfigError):
            assert card_of(own.name + edition) != own or edition.split()[0] in own.name


@pytest.mark.parametrize("name", ["sm_103", "SM103", "10.3", "compute_103", "sm_103a"])
def test_an_architecture_is_known_in_any_spelling(name: str) -> None:
    assert card_of(name).architecture == 103


@pytest.mark.parametrize("architecture", SHARED)
def test_every_architecture_has_tiles_and_an_occupancy(architecture: int) -> None:
    (step,) = explain(attention, *[heads(128)] * 3, device=f"sm_{architecture}").steps
    assert step.launches[0].shared <= SHARED[architecture] << 10
    assert occupancy(architecture, 128, step.launches[0].shared, 128) > 0
    assert PROCESSORS[architecture] >= max(
        card.processors for card in CARDS.values() if card.architecture == architecture
    )


@pytest.mark.parametrize(
    ("name", "processors", "bandwidth"),
    [
        ("NVIDIA A100-SXM4-40GB", 108, 1555),
        ("NVIDIA GeForce RTX 4090", 128, 1008),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 76, None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 132, None),
        ("NVIDIA H100 80GB HBM3", 16, None),
    ],
)
def test_rates_are_those_of_the_whole_card(
    name: str, processors: int, bandwidth: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of a GPU for laptops, nor of a slice, which bear the name too."""
    capability = {"A": 80, "G": 89, "H": 90}[name.split()[1][0]]
    runtime = SimpleNamespace(getDeviceProperties=lambda _: {"name": name.encode()})
    there = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
    monkeypatch.setattr(core_gpu, "cupy", lambda: there)
    monkeypatch.setattr(core_gpu, "limits_of", lambda _: Limits(capability, 1, processors))
    actual = card_here(0)
    assert (actual.name, actual.processors) == (name, processors)
    assert actual.bandwidth == bandwidth


def test_a_card_may_be_stated() -> None:
    x = shape((1024, 1024), "float32")
    stated = {"architecture": 86, "bandwidth": 1000, "products": 100, "products32": 10}
    assert explain(softmax, x, device=stated).floor == pytest.approx(8 * 2**20 / 1e12)
    assert explain(softmax, x, device=card_of(stated)).floor == pytest.approx(8 * 2**20 / 1e12)
    assert explain(softmax, x, device="sm_86").floor is None
    assert "unknown rates" in str(explain(softmax, x, device="sm_86"))
    few = explain(linear, *[shape((4, 8), "float32")] * 2, device=stated | {"products32": None})
    assert few.floor is None
    assert "least times need products32: pass the rate" in str(few)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: explain(softmax, np.ones(4), device="h900"), "'h900'; did you mean h200, h100"),
        (lambda: explain(softmax, np.ones(4), device="mainframe"), "choose from a100"),
        (lambda: explain(softmax, np.ones(4), device="sm_70"), "need sm_80 or newer, and sm_70"),
        (
            lambda: explain(softmax, np.ones(4), device="Tesla T4"),
            "80 or newer, and Tesla T4 is sm_75",
        ),
        (lambda: explain(softmax, np.ones(4), device="rtx 2080Ti"), "and rtx 2080Ti is sm_75"),
        (lambda: explain(softmax, np.ones(4), device={"bandwidth": 1}), "architecture is not one"),
        (lambda: explain(softmax, np.ones(4), device={"speed": 1}), "speed is not among name"),
        (
            lambda: explain(softmax, np.ones(4), device={"architecture": 80, "bandwidth": -1}),
            "bandwidth is not a number above 0",
        ),
        (lambda: explain(softmax, shape((4, 4), "float32")), "a shape has no device"),
        (lambda: explain("softmax"), "function is not callable"),  # type: ignore[arg-type]
        (lambda: shape((4, -1), "float32"), "sizes is not a tuple of integers"),
        (lambda: shape((4, 1), "float8"), "dtype is not one of float16"),
    ],
)
def test_what_makes_no_sense_is_named(call: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        call()


def test_errors_of_the_call_are_its_own() -> None:
    with pytest.raises(ShapeError, match="attention"):
        explain(attention, heads(64), heads(64, 3), heads(64, 3), device="h200")
    assert watch._watchers == ()


def test_a_definition_on_a_gpu_is_told_once() -> None:
    watch.warned.clear()
    with TestCase().assertLogs("unsloth_cupy", "WARNING") as log, gpu() as machine:
        machine.strict = False
        x = machine.place(np.ones((2, 16, 2, 60), np.float32))
        attention(x, x, x)
        attention(x, x, x, causal=True)
        linear(x, machine.place(np.ones((4, 60), np.float32)))
        softmax(machine.place(np.ones((2, 16), np.float32)))
    (record,) = log.records
    message = "attention runs its definition on the GPU: head dim 60 is not a multiple"
    assert message in record.getMessage()


def run(*arguments: object) -> click.testing.Result:
    return click.testing.CliRunner().invoke(group, ["explain", *map(str, arguments)])


def test_rows_are_no_longer_than_a_model_has_positions(tmp_path: Path) -> None:
    """Those that nobody asked for."""
    config = CONFIG | {"max_position_embeddings": 48}
    (tmp_path / "config.json").write_text(json.dumps(config))
    said = run(tmp_path, "--optimizer", "none")
    assert said.exit_code == 0, said.exception
    assert said.output == run(tmp_path, "--optimizer", "none", "--tokens", 48).output
    assert run(tmp_path, "--tokens", 49).exit_code == 1


def test_folders_of_runs_and_adapters_name_a_model(tmp_path: Path) -> None:
    config = LLAMA / "config.json"
    adapter, run_of, checkpoint = tmp_path / "adapter", tmp_path / "run", "checkpoint-00000003"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": str(LLAMA)})
    )
    (run_of / checkpoint).mkdir(parents=True)
    (run_of / checkpoint / "config.json").write_text(config.read_text())
    assert config_file(config) == config_file(LLAMA) == config_file(adapter) == config
    assert config_file(run_of) == run_of / checkpoint / "config.json"
    small = "--tokens", 16, "--optimizer", "none"
    assert run(adapter, *small).output == run(LLAMA, *small).output == run(run_of, *small).output
    (adapter / "adapter_config.json").write_text("{}")
    assert "base_model_name_or_path" in str(run(adapter).output)


OURS = [name for name, op in OPS.items() if op.definition.__module__.startswith("unsloth_cupy.")]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(OURS))
def test_the_command_explains_every_op(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantized ones too; a call of the sizes of a benchmark runs its kernel where one is."""
    monkeypatch.setattr(explanation, "resources", lambda *_: None)  # to compile takes seconds
    said = run(name, "--device", "sm_80")
    assert said.exit_code == 0, said.exception
    if OPS[name].launch is not None:
        assert "runs as      kernel" in said.output


@pytest.mark.slow
def test_what_a_kernel_takes_is_what_the_budget_says() -> None:
    if budget.missing() is not None:
        pytest.skip(str(budget.missing()))
    x = shape((4, 4096), "bfloat16")
    (step,) = explain(rms_norm, x, shape(4096, "bfloat16"), device="sm_90").steps
    (launch,) = step.launches
    options = compiler_options(launch.source)
    asked = Launch(launch.kernel, launch.source, options, launch.grid, launch.block, 0)
    used = budget.resources(asked, "90")
    resources, share = launch.resources, launch.occupancy
    assert resources is not None
    assert resources[:2] == pytest.approx(used[:2], abs=budget.REGISTER_UNIT)
    assert f"{resources.registers} registers per thread" in str(step)
    assert f"occupancy {share} %" in str(step)


def test_a_launch_that_refuses_says_why() -> None:
    """``no_kernel`` alone returns NotImplemented, or what handed on the one of another launch."""
    silent = [
        f"{path.name}:{number}"
        for path in tracked("unsloth_cupy/ops/**/*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if line.strip() == "return NotImplemented" and path.name != "no_kernel.py"
    ]
    assert silent == []


def test_a_step_has_a_floor_of_parts() -> None:
    text = run(LLAMA, "--tokens", 16, "--device", "l4").output
    assert re.search(r"sum of least times: [\d.]+ [um]s", text)
    assert "\nleast times on L4 by family of ops:\n" in text
    whole = re.search(r"^  .*\battention [\d.]+ us \(\d+%\).*$", text, re.M)
    assert whole is not None
    assert sum(int(share) for share in re.findall(r"\((\d+)%\)", whole[0])) in range(96, 105)
    assert re.search(r"^AdamW.step +1 +kernel +\d", text, re.M)
    assert "AdamW" not in run(LLAMA, "--tokens", 16, "--optimizer", "none").output
    text = run(LLAMA, "--tokens", 16, "--optimizer", "muon").output
    assert re.search(r"^Muon and AdamW.step +1 +definition +\d", text, re.M)


def test_a_step_of_adapters_and_of_fewer_bits() -> None:
    """Adapters alone are learned; packed weights are fewer bytes, which kernels unpack."""
    small = ("--tokens", 16, "--device", "l4")
    dense, packed = (
        {
            line.split()[0]: line.split()
            for line in run(LLAMA, *small, *more).output.splitlines()[2:]
            if line
        }
        for more in (("--lora", 4), ("--lora", 4, "--quantize", "nf4"))
    )
    for calls in (dense, packed):
        assert {"AdamW.step", "lora_group_backward", "lora_group"} <= calls.keys()
        assert "linear_backward" not in calls
    size = lambda row: float(row[4]) * {"KiB": 1, "MiB": 1024}[row[5]]  # noqa: E731
    assert size(packed["lora_group_backward"]) < size(dense["lora_group_backward"])
    assert int(packed["lora_group_backward"][3]) > int(dense["lora_group_backward"][3])
    frozen = run(LLAMA, "--quantize", "nf4")
    assert frozen.exit_code == 1
    assert "add --lora" in frozen.output
    assert "pass its config" in run("attention", "--lora", 4).output


@pytest.mark.slow
def test_command() -> None:
    said = run("attention", "--device", "rtx4090").output
    assert "attention_forward of attention_forward.cu" in said
    assert "RTX 4090" in said
    assert "sum of least times" in run(LLAMA, "--tokens", 16, "--device", "l4").output
    wrong = run("atention")
    assert wrong.exit_code == 1
    assert "did you mean attention" in wrong.output


@pytest.mark.parametrize("rows", [1, 64])
def test_grouped_products_show_their_tiles_and_read_experts_that_may_have_rows(rows: int) -> None:
    gate_up, down = shape((128, 96, 64), "bfloat16"), shape((128, 64, 48), "bfloat16")
    x = shape((rows, 64), "bfloat16")
    routes = shape((rows, 4), "int32"), shape((rows, 4), "bfloat16")
    (step,) = explain(experts_mlp_forward, x, gate_up, down, *routes, device="h200").steps
    said = [launch.tiles for launch in step.launches if launch.file.startswith("grouped")]
    height = grouped.tile_height(np.dtype("float16"), rows * 4, 128)
    for text, across in zip(said, (1, 1), strict=True):  # 96 and 64 columns are one tile
        blocks = (rows * 4 // height + 129) * across
        assert text.startswith(f"tiles of {height} x 128, one per block: at most {blocks}")
    assert all(text in str(step) for text in said)
    assert not any(launch.tiles for launch in step.launches if "grouped" not in launch.file)
    stacks = min(128, 4 * rows) * (96 + 48) * 64 * 2
    small = rows * (2 * 64 * 2 + 4 * (4 + 2) + 2 * 4 * 4) + 129 * 4
    assert step.moved == stacks + small
    assert step.floor == pytest.approx(step.moved / card_of("h200").bandwidth / 1e9)


LONG = CONFIG | {"num_hidden_layers": 3, "hidden_size": 512, "intermediate_size": 1536}
OFFLOAD = ("--recompute-every", "1", "--offload", "--lora", "4", "--quantize", "nf4")


def test_the_copy_stream_is_shown_beside_the_ops(tmp_path: Path) -> None:
    """Inputs of blocks are hidden states and residual sums, which the link moves twice."""
    model = models.create(LONG, seed=0, dtype="bfloat16")
    parts = CheckpointConfig(offload=True)
    rows = shape((1, 128), "int64")
    call: Any = {"device": "h200", "checkpoint": parts}
    shown = explain(model.loss_and_gradients, rows, rows, **call)
    row = 128 * 512 * 2
    assert sum(size for _, size in shown.copies) == 5 * row
    assert shown.link_seconds == pytest.approx(2 * 5 * row / 50e9)
    copy, ops = shown.part_seconds  # type: ignore[misc]
    assert copy == pytest.approx(3 * row / 2 / 50e9)  # of two blocks: one has no residual sum
    assert 0 < ops < (shown.seconds or 0)
    assert not explain(model.loss_and_gradients, rows, rows, device="h200").copies
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LONG))
    for words in (("--device", "h200"), ("--device", "sm_90")):
        done = click.testing.CliRunner().invoke(group, ["explain", str(path), *OFFLOAD, *words])
        assert done.exit_code == 0, done.output
        text = " ".join(done.output.split())
        # the embeddings are frozen: the first input of a block is on no tape
        assert ("copy stream: 512.00 KiB to the host and back in" in text) == ("h200" in words)


@pytest.mark.parametrize("card", ["h200", "rtx4090"])
def test_offload_hides_behind_products_from_4096_tokens_on(card: str) -> None:
    """Llama 3.1 8B, nf4, LoRA: predicted, with the rates of the card and of its link."""
    from ..memory.test_long_rows import LLAMA_8B

    config = parse(LLAMA_8B | {"num_hidden_layers": 3})
    for tokens in (4096, 65536):
        shown = explain_step(
            config, batch=1, tokens=tokens, dtype="bfloat16", device=card, quantization="nf4",
            adapter=new_adapter(config, 32), checkpoint=CheckpointConfig(offload=True),
        )  # fmt: skip
        copy, ops = shown.part_seconds  # type: ignore[misc]
        assert copy < ops
        assert "offload hides" in str(shown)
        slow = dataclasses.replace(shown, copies=tuple((n, 99 * size) for n, size in shown.copies))
        assert "offload does not hide: use longer rows" in str(slow)


def test_offload_of_an_explained_call_needs_recomputed_blocks(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LONG))
    done = click.testing.CliRunner().invoke(group, ["explain", str(path), "--offload"])
    assert_one_clear_error(done, "it moves the inputs of recomputed blocks: add --recompute-every")
    done = click.testing.CliRunner().invoke(group, ["explain", "softmax", "--recompute-every", "1"])
    assert_one_clear_error(done, "--lora, --quantize and --recompute-every need a model")


@pytest.mark.parametrize(
    ("source", "head"),
    [("llama", "sequence_classification"), ("llama", "none"), ("bert", "none"), ("heads", None)],
)
def test_a_step_of_other_heads(source: str, head: str | None, tmp_path: Path) -> None:
    """Those that classify, embed, and draft; their other parameters are not trained."""
    golden = Path(__file__).parents[1] / "golden"
    if source == "heads":
        config = SIZES | MIXTURES["deepseek_v3"] | {"num_nextn_predict_layers": 1}
        (tmp_path / "config.json").write_text(json.dumps(config))
    else:
        folder = golden / ("models" if source == "llama" else "encoders") / source
        labels = 2 if head == "sequence_classification" else None
        models.load(folder, head=head, labels=labels).save(tmp_path)
    done = run(tmp_path, "--tokens", 16)
    assert done.exit_code == 0, done.output
    assert "optimizers" in done.output
    if source == "heads":
        planned = plan_memory(config, batch=1, tokens=16, dtype="bfloat16")
        assert planned.optimizer > 0
