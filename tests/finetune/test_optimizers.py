"""``--optimizer``: runs that stop and go on, what is saved, and what cannot be combined."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from unsloth_cupy import AdamW, Muon, models, plan_memory
from unsloth_cupy.errors import ConfigError
from unsloth_cupy.finetune import Listener, Run, Settings, Trainer
from unsloth_cupy.finetune.run.interrupt import Interrupted, Stop
from unsloth_cupy.models.optimizers import optimizer_of, undecayed
from unsloth_cupy.models.ranks.pipeline_stages import EMBEDDING, HEAD
from unsloth_cupy.training.joined import Joined

from ..cli.test_cli import assert_one_clear_error, run, weights
from ..harness.tracked import tracked
from ..memory.test_memory import LLAMA, PHI
from ..models.peers import CONFIGS, MIXTURES, RELATIVES, SIZES

TINY: dict[str, Any] = {
    "batch": 2, "tokens": 16, "layers": 1, "hidden": 32, "vocabulary": 300, "steps": 4,
    "evaluate_every": 2, "save_every": 2, "dtype": "bfloat16",
}  # fmt: skip
OPTIMIZERS = ("muon", "adafactor", "lion", "schedulefree")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "sums.txt"
    path.write_text("\n\n".join(f"{i} and {i + 1} make {2 * i + 1}." for i in range(200)))
    return path


def train(text: Path, out: Path, stop_after: int | None = None, **settings: Any) -> Run:
    stop = Stop()

    class Stopping(Listener):
        def step(self, line: dict[str, Any]) -> None:
            stop.signal = 2 if line["step"] == stop_after else None

    given = Settings(**TINY | settings, out=out)
    return Trainer(None, text, given, listener=Stopping()).train(stop)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_run_that_stops_goes_on_in_equal_bits(optimizer: str, text: Path, tmp_path: Path) -> None:
    """With equal states, too, and it learns."""
    whole = train(text, tmp_path / "whole", optimizer=optimizer, steps=6)
    with pytest.raises(Interrupted):
        train(text, tmp_path / "run", 3, optimizer=optimizer, steps=6)
    train(text, tmp_path / "run", optimizer=optimizer, steps=6)
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")
    ends = ((tmp_path / n / "checkpoint-00000006") for n in ("run", "whole"))
    one, other = ((path / "optimizer.safetensors").read_bytes() for path in ends)
    assert one == other
    held_out = [line["held_out_loss"] for line in whole.files.lines() if "held_out_loss" in line]
    assert held_out[-1] < held_out[0]


def test_schedule_free_evaluates_and_saves_averages(text: Path, tmp_path: Path) -> None:
    """In log, checkpoints, and the model at the end, on disk and in memory."""
    out = tmp_path / "run"
    made = train(text, out, optimizer="schedulefree")
    checkpoint = out / "checkpoint-00000004"
    averages, state = (load_file(checkpoint / f"{n}.safetensors") for n in ("model", "optimizer"))
    saved = load_file(out / "model" / "model.safetensors")
    assert saved.keys() == averages.keys()
    for name, average in averages.items():
        point, base = state[f"point.{name}"], state[f"base.{name}"]
        np.testing.assert_allclose(average, point / 0.9 - base / 9, rtol=1e-4, atol=1e-6)
        assert (average != point).any()
        np.testing.assert_array_equal(saved[name], average)
    model = made.model
    assert model is not None
    for name, array in model.parameters.items():
        np.testing.assert_array_equal(array, averages[name].astype(array.dtype))
    assert {line["lr"] for line in made.files.lines() if "lr" in line} == {4e-3 * 2.5}
    loop, (*_, last) = made.loop, (line for line in made.files.lines() if "held_out_loss" in line)
    assert loop is not None
    loop._evaluate()  # of the averages, in memory
    assert made.files.lines()[-1]["held_out_loss"] == last["held_out_loss"]
    best = train(text, tmp_path / "best", optimizer="schedulefree", keep_best=True)
    losses = [line["held_out_loss"] for line in best.files.lines() if "held_out_loss" in line]
    assert losses[-1] == min(losses), "else the best are other averages"
    assert weights(tmp_path / "best") == weights(out)


# ---- which optimizer has what -------------------------------------------------------------------
@pytest.mark.parametrize("tied", [False, True])
def test_tables_and_heads_have_averages_of_32_bits(tied: bool) -> None:
    """In the plan, too: a batch has few of the tokens that a table has."""
    sizes = LLAMA | {"vocab_size": 300, "hidden_size": 64, "tie_word_embeddings": tied}
    model = models.create(sizes, seed=0)
    state = optimizer_of("adamw", model, state_bits=8).state()
    wide = {n for n, p in model.trainable.items() if p.size < 4096}
    wide |= {"model.embed_tokens.weight", *([] if tied else ["lm_head.weight"])}
    coded = model.trainable.keys() - wide
    assert coded
    assert coded == {n.partition(".")[2] for n in state if n.startswith("mean_scale.")}
    assert all(state[f"square.{name}"].dtype == np.float32 for name in wide)


def test_muon_has_the_matrices_and_adamw_the_rest() -> None:
    model = models.create(PHI, seed=0)
    joined = optimizer_of("muon", model, lr=0.1, undecayed=["model.norm.weight"])
    assert isinstance(joined, Joined)
    muon, rest = joined.optimizers
    assert isinstance(muon, Muon)
    assert isinstance(rest, AdamW)
    assert {EMBEDDING, HEAD, "model.norm.weight"} <= rest.parameters.keys()
    assert all("proj" in name for name in muon.parameters)
    assert joined.parameters.keys() == model.parameters.keys()
    block, config = "model.layers.0.", model.config
    keys = config.kv_heads * config.dim
    assert muon.parts == {
        name: rows
        for layer in range(config.layers)
        for name, rows in (
            (f"model.layers.{layer}.self_attn.qkv_proj.weight",
             (config.heads * config.dim, keys, keys)),
            (f"model.layers.{layer}.mlp.gate_up_proj.weight", (config.inner, config.inner)),
        )
    }  # fmt: skip
    assert rest.groups[0] == {"names": ["model.norm.weight"], "weight_decay": 0.0}
    model.add_adapter(4, dora=True)
    muon, rest = optimizer_of("muon", model).optimizers  # type: ignore[union-attr]
    assert {name.rpartition(".")[0][-6:] for name in muon.parameters} == {"lora_A", "lora_B"}
    own = {name.partition(block)[2] for name in muon.parts if block in name}
    layers = "self_attn.qkv_proj", "mlp.gate_up_proj"
    assert own == {f"{layer}.lora_B.weight" for layer in layers}, "A has fewer rows"
    assert rest.parameters.keys() == model.trainable.keys() - muon.parameters.keys()


# the last part of the names of linear maps, with those of routers
LINEAR = re.compile(
    r"(\w+_)?proj(_\w+|ection)?|\w+_linear|w[123]|fc[12]|c_fc|dense|query|key|value"
    r"|W(qkv|i|o)|(\w+_)?gate|router|wg|classifier"
)
MATRICES = (  # other parameters with two axes, or more
    *("embed_tokens.weight", "embed_tokens_per_layer.weight", "position_embeddings.weight"),
    *("token_type_embeddings.weight", "lm_head.weight", "score.weight", "A_log", "conv.weight"),
    *("conv1d.weight", "q_norm.weight", "k_norm.weight", "shared_head.head.weight"),
    *("embedding_projection.weight", "head.dense.weight", "pooler.dense.weight"),
    *("experts.gate_up_proj", "experts.up_proj", "experts.down_proj"),
    *("experts.gate_up_proj_bias", "experts.down_proj_bias"),
)
ENCODERS = [path.parent for path in tracked("tests/golden/encoders/*/config.json")]


def of_every_family() -> Iterator[tuple[str, models.Transformer]]:
    for label, config in (CONFIGS | RELATIVES | MIXTURES).items():
        yield label, models.create(SIZES | config, seed=0)
    heads = SIZES | MIXTURES["deepseek_v3"] | {"num_nextn_predict_layers": 1}
    yield "draft heads", models.create(heads, seed=0)
    for path in ENCODERS:
        for head in ("none", "sequence_classification"):
            yield path.name, models.load(path, head=head, labels=None if head == "none" else 3)


def test_muon_trains_linear_maps_alone_in_every_family() -> None:
    """Weight decay applies to matrices of linear maps and convolutions alone."""
    for label, model in of_every_family():
        joined: Any = optimizer_of("muon", model)
        muon, rest = joined.optimizers
        free = {*undecayed(model)}
        for name, array in model.trainable.items():
            other = array.ndim == 1 or name.endswith(MATRICES)
            if not other:
                assert name.endswith(".weight"), (label, name)
                assert LINEAR.fullmatch(name.split(".")[-2]), (label, name)
            assert (name in muon.parameters) == (not other), (label, name)
            assert (name in rest.parameters) != (name in muon.parameters)
            words = "embed_tokens", "_embeddings", "norm.weight", "A_log", "_bias"
            assert (name in free) == (array.ndim == 1 or any(w in name for w in words)), name


@pytest.mark.parametrize(
    "options",
    [
        {"targets": ["q_proj", "embed_tokens", "lm_head"]},
        {"targets": ["q_proj"], "modules": ["embed_tokens", "lm_head"]},
    ],
)
def test_muon_trains_no_adapter_of_a_table_or_head(options: dict[str, Any]) -> None:
    model = models.create(LLAMA | {"tie_word_embeddings": False}, seed=0)
    model.add_adapter(2, **options)
    joined: Any = optimizer_of("muon", model)
    muon, rest = joined.optimizers
    assert muon.parameters
    assert all(".q_proj." in name for name in muon.parameters)
    assert rest.parameters
    assert not any(".q_proj." in name for name in rest.parameters)


@pytest.mark.parametrize(
    ("label", "module", "rows"),
    [
        ("granitemoehybrid", "shared_mlp.input_linear", 2),
        ("glm4", "mlp.gate_up_proj", 2),
        ("phi3", "self_attn.qkv_proj", 3),
        ("minimax", "self_attn.qkv_proj", 0),  # its rows are q, k and v of each head in turn
    ],
)
def test_muon_divides_what_is_stored_as_one_matrix(label: str, module: str, rows: int) -> None:
    model = models.create(SIZES | (CONFIGS | RELATIVES | MIXTURES)[label], seed=0)
    joined: Any = optimizer_of("muon", model)
    names = [n for n in joined.optimizers[0].parameters if f".{module}." in n]
    assert names
    parts = joined.optimizers[0].parts
    assert all(len(parts.get(name, ())) == rows for name in names)
    assert not {name for name in parts if f".{module}." not in name and label != "phi3"}


def test_optimizers_that_step_as_one() -> None:
    """As each alone; a wrong gradient of one changes nothing of the other."""
    model = models.create(LLAMA, seed=0)
    joined: Any = optimizer_of("muon", model, lr=0.1)
    alone: Any = optimizer_of("muon", models.create(LLAMA, seed=0), lr=0.1)
    gradients = {n: np.ones_like(a) for n, a in joined.parameters.items()}
    joined.step(gradients, factor=0.5)
    for each in alone.optimizers:
        each.step({n: gradients[n] for n in each.parameters}, factor=0.5)
    assert joined.steps == 1
    for name, array in alone.parameters.items():
        np.testing.assert_array_equal(joined.parameters[name], array)
    before = {n: a.tobytes() for n, a in (joined.parameters | joined.state()).items()}
    for wrong in (gradients | {EMBEDDING: np.ones(3)}, {EMBEDDING: gradients[EMBEDDING]}):
        with pytest.raises((ConfigError, ValueError), match="step"):
            joined.step(wrong)
    with pytest.raises(ConfigError, match=r"Muon and AdamW.load_state: unknown \['mean.x'\]"):
        joined.load_state(joined.state() | {"mean.x": np.ones(3)})
    assert {n: a.tobytes() for n, a in (joined.parameters | joined.state()).items()} == before


# ---- what cannot be combined --------------------------------------------------------------------
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"optimizer": "lion", "state_bits": 8}, "lion: only AdamW has moments of 8 bits; leave"),
        ({"optimizer": "muon", "zero": 1}, "muon: data ranks divide the moments of AdamW only"),
        ({"optimizer": "adafactor", "tensor_parallel": 2}, "adafactor: its steps need whole matri"),
        (
            {"optimizer": "schedulefree", "decay": "cosine"},
            "schedulefree averages steps, which requires a constant learning rate; leave --decay"
            " cosine out",
        ),
    ],
    ids=lambda value: value.get("optimizer") if isinstance(value, dict) else "",
)
def test_what_an_optimizer_cannot_be_combined_with(
    settings: dict[str, Any], said: str, text: Path, tmp_path: Path
) -> None:
    flags = [w for n, v in settings.items() for w in (f"--{n.replace('_', '-')}", v)]
    words = ("finetune", "--text", text, "--out", tmp_path / "run", *flags)
    assert_one_clear_error(run(*words), f"--optimizer {said}")
    assert not (tmp_path / "run").exists()
    if "decay" not in settings:
        config = tmp_path / "config.json"
        config.write_text(json.dumps(LLAMA))
        assert_one_clear_error(run("plan", config, *flags), f"--optimizer {said}")


def test_a_plan_says_the_averages_of_each(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA))
    totals = {}
    for optimizer in ("adamw", *OPTIMIZERS):
        plan = plan_memory(LLAMA, batch=1, tokens=16, dtype="float32", optimizer=optimizer)
        totals[optimizer] = plan.optimizer
    weights = sum(array.nbytes for array in models.create(LLAMA, seed=0).parameters.values())
    assert totals["adamw"] == totals["schedulefree"] >= 2 * weights
    assert weights <= totals["lion"] < totals["muon"] < totals["adamw"]
    assert totals["adafactor"] < 0.1 * weights
    ranked = run("plan", config, "--tokens", 16, "--optimizer", "lion", "--data-parallel", 2)
    assert ranked.exit_code == 0, ranked.output
