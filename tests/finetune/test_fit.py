"""``fit``: its bytes are those of plans, and no other settings would be a better choice."""

import itertools
import json
import random
import statistics
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from unsloth_cupy import CheckpointConfig, DeviceMemoryError, fit, plan_memory
from unsloth_cupy.core.dtypes import BFLOAT16
from unsloth_cupy.errors import ConfigError
from unsloth_cupy.finetune import Settings, Trainer, read_data
from unsloth_cupy.finetune.data.chat import Chat
from unsloth_cupy.finetune.data.training_data import Shape, from_records
from unsloth_cupy.finetune.methods.registry import METHODS
from unsloth_cupy.finetune.planning import choices as module
from unsloth_cupy.finetune.planning.data_size import measured
from unsloth_cupy.finetune.run import limit, preparation
from unsloth_cupy.memory.plan import plan_memory as plan_of_config
from unsloth_cupy.models.configs.few_layers import extrapolated, period_of
from unsloth_cupy.models.parse import parse
from unsloth_cupy.models.text.tokenizer import load_tokenizer
from unsloth_cupy.profiling import cards
from unsloth_cupy.profiling.training_step import explain_step

from ..cli.test_cli import assert_one_clear_error, run
from ..harness.sampling import Sample
from ..harness.tracked import ROOT, tracked
from ..machines.stand_in import gpu
from ..memory.test_memory import SIZES, SMALL

LLAMA = SMALL | SIZES | {"num_hidden_layers": 6, "max_position_embeddings": 4096}
MIB = 2**20
SAMPLED = {"method": "grpo", "samples": 2, "max_new_tokens": 64}
MODELS = ROOT / "tests" / "golden" / "models"
FAMILIES = sorted({path.parent.name for path in tracked("tests/golden/models/*/config.json")})


def card(mib: float) -> dict[str, Any]:
    """Return a card, described as a user does, on which arrays may use this many MiB."""
    rates = {"bandwidth": 1000, "products": 165, "products32": 82}
    return {"architecture": 89, "memory": mib / 1024 / module.USABLE, **rates}


@pytest.mark.parametrize("family", Sample.one_in(4, FAMILIES))
def test_a_plan_of_few_layers_gives_the_bytes_of_the_whole_model(family: str) -> None:
    config = parse(json.loads((MODELS / family / "config.json").read_text()))
    experts, indexer = config.experts, config.indexer
    if experts is not None:
        experts = replace(experts, sparse=experts.sparse * 6, chosen=experts.chosen * 6)
    whole = replace(
        config, layers=6 * config.layers, layer_types=config.layer_types * 6,
        rotated=config.rotated * 6, experts=experts,
        indexer=indexer and replace(indexer, shared=indexer.shared * 6),
    )  # fmt: skip
    planned: list[int] = []

    def measure(part: Any) -> tuple[int, int]:
        planned.append(part.layers)
        plan = plan_of_config(
            part, batch=1, tokens=16, dtype="bfloat16", rank=2, recompute_every=1, offload=True
        )
        return plan.total, plan.host

    actual = extrapolated(whole, measure)
    assert sum(planned) < whole.layers or period_of(whole)[1] >= config.layers
    assert actual == pytest.approx(measure(whole), rel=0.05)  # the peak may be at another op


def test_layers_that_share_chosen_keys_belong_to_a_period() -> None:
    config = parse(json.loads((MODELS / "glm_moe_dsa" / "config.json").read_text()))
    chosen = config.experts.chosen[:1] * 12
    indexer = replace(config.indexer, shared=(False, True, True) * 4)
    experts = replace(config.experts, sparse=(True,) * 12, chosen=chosen)
    kinds = {"layer_types": config.layer_types[:1] * 12, "rotated": config.rotated[:1] * 12}
    whole = replace(config, layers=12, indexer=indexer, experts=experts, **kinds)
    assert period_of(whole) == (0, 3)


@pytest.mark.parametrize(
    ("mib", "fixed"),
    Sample.one_in(
        3,
        [
            (40, {}), (14, {}), (60, {"lora": None}), (10, {"quantize": "nf4", "lora": 4}),
            (40, SAMPLED), (12, SAMPLED),
        ],
    ),
    ids=str,
)  # fmt: skip
def test_the_choices_fit_and_no_better_one_does(
    mib: int, fixed: dict[str, Any], tmp_path: Path
) -> None:
    """With grpo, the split of a batch is also that of the answers that are sampled at once."""
    options: dict[str, Any] = {"tokens": 256, "host_memory": 2 * MIB, **fixed}
    fits, objective = None, None
    if fixed == SAMPLED:
        (tmp_path / "r.py").write_text("def one(completions):\n    return [1.0]\n")
        options["reward"] = [f"{tmp_path}/r.py:one"]
        own = {name: options[name] for name in (*SAMPLED, "reward")}
        objective = Settings(**own).learning.sized(LLAMA)
    with suppress(DeviceMemoryError):
        fits = fit(LLAMA, device=card(mib), **options)
    found: list[Any] = []
    lora = fixed.get("lora", 16)
    varied = itertools.product(
        [fixed["quantize"]] if "quantize" in fixed else [None, *["nf4"] * (lora is not None)],
        [(None, None), (1, None), (1, True)],
        [32] if lora is not None else [32, 8],
        [(4, 1), (2, 2), (1, 4)],
    )
    for kind, (every, offload), bits, (batch, accumulate) in varied:
        plan = plan_memory(
            LLAMA, batch=batch, tokens=256, dtype="bfloat16", rank=lora, quantization=kind,
            recompute_every=every, offload=bool(offload), state_bits=bits, accumulate=accumulate,
            objective=objective,
        )  # fmt: skip
        if plan.total <= mib * MIB and plan.host <= 2 * MIB:
            found.append((plan.total, kind, every, offload, bits, batch))
    assert bool(found) == (fits is not None)
    if fits is None:
        return
    for choice in (fits.fastest, fits.longest, fits.leanest):
        own = choice.settings
        (size,) = [
            total
            for total, *others in found
            if others == [own.quantize, own.recompute_every, own.offload, own.state_bits, own.batch]
        ]
        assert choice.device_bytes == pytest.approx(size, rel=1e-3)  # rounded arrays
        assert own.batch * own.accumulate == 4
        assert choice.seconds >= fits.fastest.seconds / 1.05
        assert choice.longest_row <= fits.longest.longest_row
    assert fits.leanest.device_bytes <= 1.001 * min(total for total, *_ in found)


@pytest.mark.parametrize("method", Sample.one_in(6, sorted(METHODS)))
def test_every_method(method: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"tokens": 64, "batch": 2}
    if METHODS[method].is_on_policy:
        (tmp_path / "r.py").write_text(
            "def one(completions):\n    return [1.0] * len(completions)\n"
        )
        options |= {"reward": [f"{tmp_path}/r.py:one"], "max_new_tokens": 8, "samples": 2}
    if "teacher" in METHODS[method].uses:
        (tmp_path / "config.json").write_text(json.dumps(LLAMA))
        options["teacher"] = tmp_path
    fits = fit(LLAMA, device="rtx 4090", method=method, **options)
    assert fits.fastest.seconds > 0
    assert f"--method {method}" in fits.fastest.command or method == "sft"
    draws = METHODS[method].is_on_policy
    assert fits.not_varied == (("samples=2", "max_new_tokens=8") if draws else ())


@pytest.mark.slow
def test_settings_that_fit_nothing_are_an_error_with_the_least() -> None:
    with pytest.raises(DeviceMemoryError, match="no settings fit") as caught:
        fit(LLAMA, device=card(1), tokens=256)
    assert caught.value.required > caught.value.available == pytest.approx(MIB, rel=1e-6)


@pytest.mark.slow
def test_the_longest_row_fits_and_each_reason_is_true() -> None:
    """A longer row does not fit, and a step needs as many bytes without a setting as stated."""
    fits = fit(LLAMA, device=card(14), tokens=256, host_memory=2**40)
    longest = fits.longest

    def planned(settings: Settings, batch: int, tokens: int) -> int:
        plan = plan_memory(
            LLAMA, batch=batch, tokens=tokens, dtype="bfloat16", rank=settings.lora,
            quantization=settings.quantize, recompute_every=settings.recompute_every,
            offload=bool(settings.offload),
        )  # fmt: skip
        return plan.total

    assert planned(longest.settings, 1, longest.longest_row) <= 1.001 * 14 * MIB
    assert planned(longest.settings, 1, longest.longest_row + 64) > 0.999 * 14 * MIB
    reasons = dict(
        each.split(": without this, a step would need ") for each in fits.fastest.reasons
    )
    assert reasons
    for setting, text in reasons.items():
        assert text.endswith("which does not fit")
        changes = {name.split("=")[0] for name in setting.split(", ")}
        usual = {name: getattr(Settings(), name) for name in changes}
        without = replace(fits.fastest.settings, **usual)
        size, unit = text.replace(",", "").split()[:2]
        actual = float(size) * {"MiB": MIB, "GiB": 2**30}[unit]
        assert actual == pytest.approx(planned(without, without.batch, 256), rel=0.02)  # a line


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer."""
    folder = tmp_path_factory.mktemp("fit")
    (folder / "text.txt").write_text(
        "\n\n".join(f"{i}. A cat sees {i * i} mice" for i in range(400))
    )
    sizes: dict[str, Any] = {"layers": 2, "hidden": 32, "vocabulary": 300, "tokens": 64}
    Trainer(
        data=folder / "text.txt",
        settings=Settings(steps=1, out=folder / "run", **sizes),
        quiet=True,
    ).train()
    return folder / "run" / "model"


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """Chats of different lengths."""
    path = tmp_path / "chats.jsonl"
    pair = ("user", "assistant")
    rows = [
        {"messages": [{"role": role, "content": f"{i} mice, " * (1 + i % 3)} for role in pair]}
        for i in range(90)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.mark.parametrize("pack", [True, False])
def test_steps_are_about_those_of_a_run(
    model: Path, chats: Path, pack: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fits = fit(model, data=chats, device="rtx 4090", pack=pack, epochs=2)
    steps: list[int] = []
    with_steps = preparation.with_steps

    def recorded(*arguments: Any, **options: Any) -> Any:
        plan = with_steps(*arguments, **options)
        steps.append(plan.steps)
        return replace(plan, steps=1)

    monkeypatch.setattr(preparation, "with_steps", recorded)
    settings = Settings(out=tmp_path / "run", lora=4, pack=pack, epochs=2)
    Trainer(model, chats, settings, quiet=True).train()
    assert fits.steps == pytest.approx(steps[0], rel=0.1, abs=1)  # packing leaves room
    best = fits.fastest
    assert fits.steps is not None
    assert best.hours == pytest.approx(fits.steps * best.seconds / 3600)
    command = best.command.split()
    assert command[:3] == ["unsloth-cupy", "finetune", str(model)]
    assert command[3:5] == ["--data", str(chats)]


@pytest.mark.parametrize(("batch", "tokens"), [(4, None), (2, 90), (1, 40)])
def test_packing_is_a_choice(model: Path, chats: Path, batch: int, tokens: int | None) -> None:
    """The fastest is at least as fast as with each of the two, and names the difference."""
    options: dict[str, Any] = {
        "data": chats, "device": "rtx 4090", "batch": batch, "tokens": tokens, "epochs": 1,
    }  # fmt: skip
    best = fit(model, **options).fastest
    packed, rows = (fit(model, **options, pack=pack).fastest for pack in (True, False))
    each = [choice.hours / choice.steps for choice in (packed, rows)]  # type: ignore[operator]
    assert each == pytest.approx([packed.seconds / 3600, rows.seconds / 3600])
    assert best.hours == pytest.approx(min(packed.hours, rows.hours))  # type: ignore[type-var]
    shown = [reason for reason in best.reasons if reason.startswith("pack=True")]
    assert bool(shown) == (rows.hours > 1.02 * packed.hours)  # type: ignore[operator]
    assert not any("pack" in reason for reason in (*packed.reasons, *rows.reasons))
    assert packed.tokens_per_second >= 0.99 * rows.tokens_per_second


@pytest.mark.parametrize("method", ["sft", "dpo"])
@pytest.mark.parametrize("batch", [1, 3])
def test_the_padding_of_rows_is_that_of_a_run(
    model: Path, tmp_path: Path, batch: int, method: str
) -> None:
    """The mean width of batches without packing, and the tokens of an epoch with it."""
    draw = random.Random(0)
    texts = [[f"{side} cat sees " * draw.randint(1, 9) for side in "ab"] for _ in range(200)]
    names = ("prompt", "completion") if method == "sft" else ("chosen", "rejected")
    rows = [dict(zip(names, each, strict=True)) for each in texts]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data: Any = read_data(tmp_path / "rows.jsonl", method=method)
    settings = Settings(batch=batch, method=method)
    tokenizer, config = (
        load_tokenizer(model),
        parse(json.loads((model / "config.json").read_text())),
    )
    size = measured(data, model, settings, config, METHODS[method])
    for pack in (True, False):
        shape = Shape(batch, size.tokens, pack, 0, METHODS[method])
        run = from_records(data, tokenizer, config, shape, 0, Chat(model)).batches
        every = [run.at(number) for number in range(run.count(1))]
        expected = sum(each.real if pack else each.tokens.size for each in every)
        rows_of_epoch = size.rows(packed=pack) * METHODS[method].group
        actual = rows_of_epoch * size.row(batch, packed=pack)
        assert actual == pytest.approx(expected, rel=0.05)  # a mean over the order of rows


def test_the_steps_of_running_text(model: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("A cat sees 10 mice.\n\n" * 2000)
    fits = fit(model, data=tmp_path / "text.txt", device="rtx 4090", epochs=1, tokens=32)
    tokens = len(load_tokenizer(model).encode("A cat sees 10 mice.\n\n" * 1800).ids)
    assert fits.steps == pytest.approx(tokens / 32 / 4, rel=0.1)  # a sample, and a held-out part


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"device": "rtx 9999"}, "no GPU is known"),
        ({"device": "b300"}, "are unknown; pass"),
        ({"device": "sm_90"}, "are unknown; pass"),
        ({"device": "cuda:7"}, "no such GPU"),
        ({"data": "missing.jsonl"}, "tokens need a tokenizer"),
        ({"limit_memory": MIB}, "leave limit_memory out"),
        ({"batch_size": 4}, "batch_size"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(options: dict[str, Any], problem: str) -> None:
    with pytest.raises((ConfigError, TypeError), match=problem):
        fit(LLAMA, **{"device": "rtx 4090", **options})


def test_data_that_cannot_be_read_are_named(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.jsonl"):
        fit(model, data="missing.jsonl", device="rtx 4090")


def test_the_command(model: Path, chats: Path) -> None:
    """The table has a row per choice; --json has the same cells and the commands."""
    result = run("plan", model, "--data", chats, "--device", "rtx4090", "--fit", "--lora", 8)
    assert result.exit_code == 0, result.output
    for text in ("fastest", "longest row", "least memory", "43.9 ms", "--lora 8", "RTX 4090"):
        assert text in result.output
    assert "--pack: without this, an epoch would take" in result.output
    words = ("plan", model, "--tokens", 32, "--device", "16gb rtx 4060 ti", "--fit", "--json")
    tables = [json.loads(line) for line in run(*words).output.splitlines()]
    assert [row["settings"] for row in tables[0]["rows"]] == [
        "fastest",
        "longest row",
        "least memory",
    ]
    assert all("unsloth-cupy finetune" in row["command"] for row in tables[1]["rows"])


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--fit", "--data-parallel", 2), "--data-parallel is not supported"),
        (("--fit", "--zero", 1), "--zero is not supported"),
        (("--fit", "--plot", "x.svg"), "--plot is not supported"),
        (("--fit",), "no such GPU"),
        (("--data", "x.jsonl"), "--data requires --fit"),
        (("--host-memory", "1GiB"), "--host-memory requires --fit"),
        (("--device", "rtx 9999"), "no GPU is known"),
    ],
    ids=str,
)
def test_wrong_options(words: tuple[Any, ...], problem: str, model: Path) -> None:
    result = run("plan", model, *words)
    assert_one_clear_error(result)
    assert problem in result.output


def test_a_named_card_is_in_the_table_of_a_plan(model: Path) -> None:
    result = run("plan", model, "--tokens", 32, "--device", "rtx 5090")
    assert result.exit_code == 0, result.output
    assert "RTX 5090" in result.output


def test_a_run_trains_with_the_settings_that_fit(
    model: Path, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``finetune --fit``; given options stay, and a resumed run has the same settings."""
    monkeypatch.setattr(module, "card_here", lambda number: cards.card_named("rtx 4090"))
    sizes = [0.55 * MIB]
    monkeypatch.setattr(module, "device_memory", lambda device: (2**40, round(sizes[0])))
    runs = []
    for steps in (1, 2):
        with gpu("80", devices=1) as machine:
            machine.strict, machine.runs = False, True
            result = run(
                "finetune", model, "--data", chats, "--fit", "--device", "cuda", "--lora", 2,
                "--steps", steps, "--out", tmp_path / "run", "--no-graph",
            )  # fmt: skip
        assert result.exit_code == 0, result.output
        assert ("least memory" in result.output) == (steps == 1)
        stored = json.loads((tmp_path / "run" / "settings.json").read_text())
        runs.append([stored[name] for name in ("lora", "batch", "accumulate", "recompute_every")])
        sizes[0] = 2**36  # more memory is free later
    lora, batch, accumulate, every = runs[0]
    assert (lora, batch * accumulate) == (2, 4)
    assert batch < 4 or every == 1
    assert runs[1] == runs[0]


def test_fit_needs_a_gpu_and_a_model(model: Path, chats: Path, tmp_path: Path) -> None:
    for words, problem in (
        ((model, "--device", "cpu"), "a single process with a GPU"),
        ((), "an existing model"),
    ):
        result = run("finetune", *words, "--data", chats, "--fit", "--out", tmp_path)
        assert_one_clear_error(result)
        assert f"--fit needs {problem}" in result.output


def test_offload_that_the_host_cannot_hold_ends_before_training() -> None:
    sizes = limit.Sizes(parse(LLAMA), 4, 256, "cuda", exists=True)
    settings = Settings(recompute_every=1, offload=True, dtype="bfloat16", host_memory=MIB)
    with pytest.raises(DeviceMemoryError, match="host memory") as caught:
        limit.checked_plan(sizes, settings.decided(new=False), 2**40)
    assert caught.value.required > caught.value.available == MIB
    limit.checked_plan(sizes, replace(settings, host_memory=2**30).decided(new=False), 2**40)


def test_efficiencies_are_those_of_the_page() -> None:
    """Each is the best bfloat16 row of its op; other ops have the median."""
    rows = json.loads((ROOT / "docs" / "performance.json").read_text())
    best = {
        op: max(row["of_roofline"] for row in facts["rows"] if row["dtype"] == "bfloat16")
        for op, facts in rows.items()
        if any(row["dtype"] == "bfloat16" for row in facts["rows"])
    }
    for op, expected in cards.EFFICIENCY.items():
        assert expected == pytest.approx(best[op], abs=0.006), op  # two digits
    median = statistics.median(best.values())
    assert median == pytest.approx(cards.OTHER_OPS, abs=0.01)  # two digits


def test_recomputing_blocks_takes_longer() -> None:
    """Also where MLPs have chunks of rows, which a plan runs once."""
    wide = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 2}
    config = parse(SMALL | SIZES | wide | {"max_position_embeddings": 8192})
    sizes: dict[str, Any] = {"batch": 1, "tokens": 8192, "dtype": BFLOAT16, "device": "h200"}
    plain = explain_step(config, **sizes).seconds
    again = explain_step(config, **sizes, checkpoint=CheckpointConfig()).seconds
    assert plain is not None
    assert again == pytest.approx(plain * 4 / 3, rel=0.1)  # the head is not repeated


def test_the_measured_step_is_predicted_within_12_percent() -> None:
    """The step of docs/examples/speed_of_a_model.py, which took 43.9 ms on an H200."""
    values = {
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632,
        "vocab_size": 32768, "num_hidden_layers": 8, "num_attention_heads": 16,
        "num_key_value_heads": 4, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096,
    }  # fmt: skip
    explanation = explain_step(parse(values), batch=4, tokens=2048, dtype=BFLOAT16, device="h200")
    assert explanation.seconds == pytest.approx(0.0395, rel=0.005)  # as ``plan --fit`` prints
    assert explanation.seconds == pytest.approx(0.0439, rel=0.12)  # what is known of predictions
