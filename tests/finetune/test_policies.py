"""Runs that learn from rewards of their own answers: grpo and rloo."""

import dataclasses
import gc
import json
import re
import shutil
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from unsloth_cupy.errors import ConfigError
from unsloth_cupy.finetune import Lora, Run, Settings, Trainer, read_data
from unsloth_cupy.finetune.methods.policy_methods import Policy
from unsloth_cupy.finetune.methods.reward_models import RewardModel
from unsloth_cupy.finetune.run.interrupt import Interrupted, Stop
from unsloth_cupy.finetune.run.run_folder import RunFolder
from unsloth_cupy.memory.plan import plan_memory
from unsloth_cupy.memory.planned_model import new_adapter
from unsloth_cupy.memory.pool import memory_pool
from unsloth_cupy.models import Transformer, create, load
from unsloth_cupy.models.parse import parse
from unsloth_cupy.ops.common import threads

from ..cli.test_cli import assert_one_clear_error, run
from ..golden import generate_methods as golden
from ..harness.sampling import Sample
from ..parallel.ranks import by_sockets
from .test_methods import Halts, log, model_times, write

REWARDS = '''
import json
from pathlib import Path

CALLS = Path(__file__).with_name("calls.jsonl")

def low(completions):
    """The share of words with a number below 100."""
    words = [each.split() for each in completions]
    return [sum(int(w[1:]) < 100 for w in each) / max(len(each), 1) for each in words]

def right(prompts, completions, completion_ids, answer):
    line = {"prompts": prompts, "ids": completion_ids, "texts": completions}
    line["low"] = low(completions)
    line["right"] = [float(a in c.split()) for a, c in zip(answer, completions)]
    with CALLS.open("a") as file:
        file.write(json.dumps(line) + "\\n")
    return line["right"]

def one(completions):
    return [1] * len(completions)

def some(completions):
    return [None if "w1" in each else 2 for each in completions]
'''


def asked() -> list[dict[str, str]]:
    return [{"prompt": p["prompt"], "answer": f"w{n}"} for n, p in enumerate(golden.pairs())]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policies")
    model_times(1.0, folder / "long")
    model_times(1.0, folder / "model")
    config = json.loads((folder / "model" / "config.json").read_text())
    config["eos_token_id"] = [2, *range(150, 200)]  # so that answers end soon
    (folder / "model" / "config.json").write_text(json.dumps(config))
    write(folder / "prompts.jsonl", asked())
    (folder / "rewards.py").write_text(REWARDS)
    return folder


def trainer(home: Path, out: Path, *, lora: Any = None, **settings: Any) -> Trainer:
    data, model = settings.pop("data", home / "prompts.jsonl"), settings.pop("model", "model")
    reward = (f"{home}/rewards.py:right", f"{home}/rewards.py:low:0.5")
    usual = {"method": "grpo", "eval": data, "lr": 1e-3, "steps": 1, "batch": 6, "samples": 4}
    usual |= {"max_new_tokens": 6, "reward": reward, "decay": "constant", "warmup": 0}
    return Trainer(home / model, data, Settings(out=out, **usual | settings), lora=lora)


def calls(home: Path, trained: Trainer) -> tuple[Any, list[dict[str, Any]]]:
    """Return a run, and what its reward was called with."""
    (home / "calls.jsonl").unlink(missing_ok=True)
    made = trained.train()
    return made, [*map(json.loads, (home / "calls.jsonl").read_text().splitlines())]


def gains(call: dict[str, Any], kind: str) -> np.ndarray[Any, Any]:
    """Return the advantages of a call's answers, four to a prompt."""
    groups = (np.array(call["right"]) + 0.5 * np.array(call["low"])).reshape(-1, 4)
    if kind == "rloo":
        return (groups - (groups.sum(1, keepdims=True) - groups) / 3).ravel()
    means, std = groups.mean(1, keepdims=True), groups.std(1, ddof=1, keepdims=True)
    return ((groups - means) / (std + 1e-4)).ravel()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch": 3, "accumulate": 2, "pack": False, "temperature": 0.7, "loss": "dr_grpo"},
        {"loss": "grpo", "batch": 3, "accumulate": 2},
        {"method": "rloo"},
    ],
)
def test_the_first_step_is_that_of_torch(
    options: dict[str, Any], home: Path, tmp_path: Path
) -> None:
    """Loss, gradient and measures of the answers that the rewards saw; held-out ones are greedy."""
    transformers = pytest.importorskip("transformers", reason="which computes the logits")
    torch = pytest.importorskip("torch", reason="which transformers is made of")
    made, seen = calls(home, trainer(home, tmp_path / "run", **options))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(home / "model", dtype=torch.float32)
    theirs.model.embed_tokens.padding_idx = None  # answers have all tokens
    kind = options.get("loss", options.get("method", "dapo"))
    words, losses, entropies, tokens = golden.tokenizer(), [], [], 0
    first, *others = seen
    step = others[: options.get("accumulate", 1)]
    texts = sum(len(call["ids"]) for call in step)
    for call in step:
        for prompt, ids, gain in zip(call["prompts"], call["ids"], gains(call, kind), strict=True):
            start = words.encode(prompt).ids
            logits = theirs(torch.tensor([start + ids])).logits[0, len(start) - 1 : -1]
            logs = (logits / options.get("temperature", 1.0)).log_softmax(-1)
            own = logs[torch.arange(len(ids)), torch.tensor(ids)]
            ratio = (own - own.detach()).exp()
            each = -gain * ((own.sum() - own.sum().detach()).exp() if kind == "rloo" else ratio)
            losses.append(each.mean() if kind == "grpo" else each.sum())
            entropies += (-(logs.exp() * logs).sum(-1)).tolist()
            tokens += len(ids)
    count = {"dapo": tokens, "dr_grpo": texts * 6}.get(kind, texts)
    loss = torch.stack(losses).sum() / count
    loss.backward()
    norm = sum(float((p.grad.double() ** 2).sum()) for p in theirs.parameters()) ** 0.5
    before, line, _ = made.files.lines()
    assert len({len(ids) for call in step for ids in call["ids"]}) > 2
    assert line["loss"] == pytest.approx(float(loss), rel=1e-5, abs=2e-6)
    assert line["gradient_norm"] == pytest.approx(norm, rel=2e-4)
    assert line["entropy"] == pytest.approx(np.mean(entropies), rel=1e-5)
    assert line["length"] == pytest.approx(tokens / texts)
    assert line["clipped"] == 0
    assert line["ratio"] == pytest.approx(1, abs=1e-5)
    right, low = (np.concatenate([call[name] for call in step]) for name in ("right", "low"))
    assert line["reward_right"] == pytest.approx(right.mean())
    assert line["reward"] == pytest.approx((right + low / 2).mean())
    assert before["held_out_reward_low"] == pytest.approx(np.mean(first["low"]))
    assert before["held_out_loss"] == -before["held_out_reward"]
    assert before["held_out_prompts"] == len(first["prompts"]) == 6
    for prompt, ids in zip(first["prompts"], first["ids"], strict=True):
        start = words.encode(prompt).ids
        logits = theirs(torch.tensor([start + ids])).logits[0, len(start) - 1 : -1]
        assert logits.argmax(-1).tolist() == ids


def test_the_divergence_is_from_the_model_before_the_run(home: Path, tmp_path: Path) -> None:
    """Of the second step, by the adapter that the first one has left; it is in the loss too."""
    options: dict[str, Any] = {"lora": Lora(2), "beta": 2.0, "lr": 3e-2, "temperature": 0.7}
    one = trainer(home, tmp_path / "one", **options).train()
    made, seen = calls(home, trainer(home, tmp_path / "two", **options, steps=2, evaluate_every=9))
    plain = trainer(home, tmp_path / "plain", **options | {"beta": 0.0}, steps=2).train()
    ours, total, terms, tokens = load(one.files.model), 0.0, 0.0, 0
    for prompt, ids in zip(seen[2]["prompts"], seen[2]["ids"], strict=True):
        start = golden.tokenizer().encode(prompt).ids
        row = np.array([start + ids])
        both = (
            each.log_probs(row, row, temperature=0.7).log_probs[0] for each in (ours, ours.base)
        )
        now, base = (each[len(start) - 1 : -1] for each in both)
        total += float((np.exp(base - now) - (base - now) - 1).sum())
        tokens += len(ids)
    terms = -sum(len(i) * g for i, g in zip(seen[2]["ids"], gains(seen[2], "dapo"), strict=True))
    first, second = (line for line in made.files.lines() if "loss" in line)
    assert first["kl"] == pytest.approx(0, abs=1e-6)
    assert second["kl"] == pytest.approx(total / tokens, rel=1e-4)
    assert second["kl"] > 1e-3
    assert second["loss"] == pytest.approx((terms + 2 * total) / tokens, rel=1e-4)
    assert "kl" not in plain.files.lines()[1]


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["dapo", "grpo"])
def test_more_updates_learn_from_the_same_answers(loss: str, home: Path, tmp_path: Path) -> None:
    """The second update is clipped by ratios to the sampler, computed here by its own model.

    A rollout has two batches, of an update each; dapo divides by the mean of their tokens.
    """
    options: dict[str, Any] = {"lr": 3e-2, "temperature": 0.7, "loss": loss, "batch": 3}
    options |= {"steps_per_generation": 2, "num_iterations": 2, "evaluate_every": 9}
    one = trainer(home, tmp_path / "one", **options).train()
    made, seen = calls(home, trainer(home, tmp_path / "four", **options, steps=6))
    assert len(seen) == 2 + 4  # an evaluation at either end; answers are drawn twice
    before, after = (load(each, dtype="float32") for each in (home / "model", one.files.model))
    total, tokens, clipped, ratios = 0.0, 0, 0, 0.0
    answers = [*zip(seen[2]["prompts"], seen[2]["ids"], gains(seen[2], loss), strict=True)]
    for prompt, ids, gain in answers:
        start = golden.tokenizer().encode(prompt).ids
        row = np.array([start + ids])
        now, old = (
            each.log_probs(row, row, temperature=0.7).log_probs[0, len(start) - 1 : -1]
            for each in (after, before)
        )
        ratio = np.exp(now - old)
        terms = -np.minimum(ratio * gain, ratio.clip(0.8, 1.2) * gain)
        total += terms.mean() if loss == "grpo" else terms.sum()
        clipped += (((ratio > 1.2) & (gain > 0)) | ((ratio < 0.8) & (gain < 0))).sum()
        tokens, ratios = tokens + len(ids), ratios + ratio.sum()
    both = [len(ids) for call in seen[1:3] for ids in call["ids"]]
    count = len(answers) if loss == "grpo" else sum(both) / 2
    assert tokens * 2 != sum(both)
    first, second, third, fourth, fifth, _ = (n for n in made.files.lines() if "loss" in n)
    assert second["loss"] == pytest.approx(total / count, rel=1e-4)
    assert second["clipped"] == pytest.approx(clipped / tokens)
    assert second["ratio"] == pytest.approx(ratios / tokens, rel=1e-4)
    assert 0.05 < second["clipped"] < 0.9
    assert (first["ratio"], fifth["ratio"]) == (pytest.approx(1), pytest.approx(1))
    for line, again in ((first, third), (second, fourth)):
        assert (line["reward"], line["length"]) == (again["reward"], again["length"])
        assert line["loss"] != again["loss"]
    assert fifth["length"] != first["length"]


def test_epochs_count_the_updates(home: Path, tmp_path: Path) -> None:
    options = {"steps": None, "epochs": 2, "batch": 2, "num_iterations": 3}
    made = trainer(home, tmp_path / "run", **options, lr=1e-5, evaluate_every=99).train()
    assert [line["step"] for line in made.files.lines() if "loss" in line][-1] == 2 * 3 * 3


def test_ranks_compare_rewards(home: Path, tmp_path: Path) -> None:
    """Functions in files by a digest of the file."""
    path, data = tmp_path / "rewards.py", read_data(home / "prompts.jsonl", method="grpo")
    seen = []
    for factor in "121":
        path.write_text(
            f"def low(completions, **more):\n    return [{factor}] * len(completions)\n"
        )
        made = trainer(home, tmp_path / "run", reward=[f"{path}:low", f"{home}/rewards.py:right"])
        made.evaluated = {}
        facts = made._facts(data)
        assert all(" with the digest " in facts[f"reward {number}"] for number in (1, 2))
        seen.append((facts["reward 1"], facts["reward 2"]))
    assert seen[0] == seen[2]
    assert seen[0][0] != seen[1][0]
    assert seen[0][1] == seen[1][1]


@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("iterations", [1, 2])
@pytest.mark.parametrize("updates", [1, 2, 3])
def test_the_order_of_updates(accumulate: int, iterations: int, updates: int, home: Path) -> None:
    """Each rollout has the batches of some updates, which repeat before the next is drawn."""
    at_once = accumulate * updates
    options = {"accumulate": accumulate, "num_iterations": iterations}
    options |= {"steps_per_generation": at_once}
    method = Settings(method="grpo", reward=[f"{home}/rewards.py:low"], **options).learning
    expected = [
        rollout * at_once + update * accumulate
        for rollout in range(3) for _ in range(iterations) for update in range(updates)
    ]  # fmt: skip
    assert method.updates(accumulate) == updates * iterations
    for batches in range(2 * at_once + 1, 3 * at_once + 1):
        assert method.steps(batches, accumulate) == len(expected)
    assert [method.first(step, accumulate) for step in range(len(expected))] == expected
    for number in range(3 * at_once):
        own = range(number // at_once * at_once, (number // at_once + 1) * at_once)
        assert method.drawn_with(number) == own


@pytest.mark.parametrize(
    ("positions", "new", "expected"),
    [(1, None, 1), (2, None, 1), (40, None, 20), (511, None, 255), (9999, None, 256), (9, 8, 8)],
)
def test_the_most_tokens_of_an_answer(positions: int, new: int | None, expected: int) -> None:
    """Half of the positions and 256 at most; a question has a token at least."""
    method: Any = Settings(method="grpo", max_new_tokens=new).learning
    sized = method.sized(DEEP | {"max_position_embeddings": positions})
    assert sized.max_new_tokens == expected
    for tokens in (1, expected, expected + 1, expected + 2, expected + 9):
        assert sized.question_length(tokens) == max(1, tokens - expected)


@pytest.mark.slow
def test_ranks_are_one_process(home: Path, tmp_path: Path) -> None:
    """Those with the same weights answer their own prompts; of those that divide it, one judges."""
    judged, adapted = f"--reward {home}/rewards.py:right", "--lora 2 --beta 0.1"
    grids = {  # grid, and all else
        "plain": ("--data-parallel 2", ""),
        "repeated": (
            "--data-parallel 2",
            "--num-iterations 2 --steps-per-generation 2 --loss grpo",
        ),
        "adapted": ("--data-parallel 2", f"{adapted} --no-pack --accumulate 2"),
        "rloo": ("--data-parallel 2 --zero 1", "--method rloo"),
        "tensor": ("--tensor-parallel 2", judged),
        "tensor-adapted": ("--tensor-parallel 2", f"{adapted} --no-pack"),
        "pipeline": ("--pipeline-parallel 2", f"--method rloo --accumulate 2 {judged}"),
        "pipeline-adapted": ("--pipeline-parallel 2", adapted),
        "context": ("--context-parallel 2", adapted),
    }
    grids = {name: grids[name] for name in Sample.one_in(2, grids)}

    def asked(name: str, ranks: int) -> list[str]:
        given = {
            "--data": home / "prompts.jsonl", "--eval": home / "prompts.jsonl", "--method": "grpo",
            "--reward": f"{home}/rewards.py:low", "--out": tmp_path / f"{name}-{ranks}",
            "--batch": 3, "--samples": 4, "--max-new-tokens": 6, "--lr": 1e-3, "--steps": 4,
            "--evaluate-every": 2,
        }  # fmt: skip
        grid, more = (each.split() for each in grids[name])
        words = [*map(str, chain(*given.items())), *more, *(grid if ranks > 1 else ())]
        return ["finetune", str(home / "model"), *words, "--"]

    calls = home / "calls.jsonl"
    calls.write_text("")
    both = [word for name in grids for word in asked(name, 2)]
    for ended in by_sockets(2, "tests.parallel.commands", *both[:-1], limit=240):
        assert ended.code == 0, ended.said
    of_ranks = calls.read_text()
    calls.write_text("")
    for name in grids:
        done = run(*asked(name, 1)[:-1])
        assert done.exit_code == 0, done.output
        logs = [log(Run("", RunFolder(tmp_path / f"{name}-{n}"), None)) for n in (1, 2)]
        assert len(logs[0]) == 4 + 3
        for line, other in zip(*logs, strict=True):
            assert other == pytest.approx(line, rel=1e-4, abs=1e-5), name
    assert of_ranks == calls.read_text()


def test_each_step_draws_other_answers(home: Path, tmp_path: Path) -> None:
    """A function gets their text without the token that ends it, which is in their tokens."""
    one = write(tmp_path / "one.jsonl", [row | {"prompt": "w1 w2"} for row in asked()])
    options: dict[str, Any] = {"data": one, "steps": 2, "lr": 1e-12, "evaluate_every": 9}
    _, seen = calls(home, trainer(home, tmp_path / "run", **options))
    assert sum(a == b for a, b in zip(seen[1]["ids"], seen[2]["ids"], strict=True)) < 12
    words, ended = golden.tokenizer(), 0
    for call in seen:
        for ids, text in zip(call["ids"], call["texts"], strict=True):
            is_end = ids[-1] == 2 or 150 <= ids[-1] < 200
            ended += is_end
            assert text == words.decode(ids[:-1] if is_end else ids)
            assert is_end or len(ids) == 6
    assert ended > 10


def test_answers_of_chats_end_as_the_template_ends_them(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stops, draw = [], Transformer.rollouts

    def noted(self: Any, *prompts: Any, **options: Any) -> Any:
        stops.append(options["stop"])
        return draw(self, *prompts, **options)

    monkeypatch.setattr(Transformer, "rollouts", noted)
    shutil.copytree(home / "model", tmp_path / "model")
    template = "{% for m in messages %}<s> {{ m.content }} <pad> {% endfor %}"
    settings = json.dumps({"chat_template": template})
    (tmp_path / "model" / "tokenizer_config.json").write_text(settings)
    data = write(tmp_path / "a.jsonl", [{"question": f"w{n}", "answer": ""} for n in range(6)])
    chats = {"model": tmp_path / "model", "data": data, "reward": [f"{home}/rewards.py:one"]}
    trainer(home, tmp_path / "run", **chats).train()
    trainer(home, tmp_path / "raw").train()
    assert stops == [[2, *range(150, 200), 0]] * 3 + [None] * 3


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"num_iterations": 3, "steps_per_generation": 2}])
def test_a_run_that_goes_on_has_equal_bits(more: Any, home: Path, tmp_path: Path) -> None:
    """Also in the middle of the updates that learn from the same answers."""
    own = tmp_path / "own.py"
    own.write_text(REWARDS)
    options: dict[str, Any] = {"steps": 4, "batch": 2, "evaluate_every": 2, "lora": Lora(2)}
    options |= {"reward": [f"{own}:low", f"{own}:some:0.1"], "beta": 0.01, **more}
    stop, out = Stop(), tmp_path / "run"
    halted = trainer(home, out, **options)
    halted.callbacks = [Halts(stop, 2)]
    with pytest.raises(Interrupted):
        halted.train(stop)
    again = trainer(home, out, **options, reward_seconds=30.0).train()
    expected = trainer(home, tmp_path / "whole", **options).train()
    assert log(again) == log(expected)
    both = [
        load_file(*(each / "model").glob("*.safetensors")) for each in (out, tmp_path / "whole")
    ]
    for name, weight in both[1].items():
        np.testing.assert_array_equal(both[0][name], weight)
    with pytest.raises(ConfigError, match=r"holds a run with samples 4 \(now 5\)"):
        trainer(home, out, **options | {"samples": 5}).train()
    own.write_text(REWARDS + "\n")
    with pytest.raises(ConfigError, match=r"holds a run with reward own.py has changed since"):
        trainer(home, out, **options).train()


def test_answers_become_better(home: Path, tmp_path: Path) -> None:
    options = {"steps": 25, "lr": 1e-2, "reward": [f"{home}/rewards.py:low"], "max_new_tokens": 4}
    first, *_, last = (
        line for line in trainer(home, tmp_path / "run", **options).train().files.lines()
        if "loss" not in line
    )  # fmt: skip
    assert first["held_out_reward"] < 0.7
    assert last["held_out_reward"] > 0.95
    assert "held_out_reward_low" not in last  # of one function, it is the reward


@pytest.mark.slow
def test_a_step_holds_what_is_planned(home: Path, tmp_path: Path) -> None:
    """Answers that fill their rows; where some end before, a step holds less."""
    data, asks = (
        write(tmp_path / f"{n}.jsonl", [{"prompt": f"w{m} " * n, "answer": ""} for m in range(6)])
        for n in (1, 60)
    )
    all_more: tuple[dict[str, Any], ...] = ({}, {"lora": Lora(4), "beta": 0.1}, {"accumulate": 2})
    all_more += {"pack": False}, {"data": asks}, {"invariant": True}  # no logits are of a question
    for more in all_more:
        options = {
            "model": "long",
            "data": data,
            "max_new_tokens": 12,
            "steps": 2,
            "batch": 3,
            **more,
        }
        made = trainer(home, tmp_path / f"run-{'-'.join(more)}", **options).train()
        _, line = (line for line in made.files.lines() if "peak_bytes" in line)
        assert line["length"] > 11  # the first step imports modules, whose objects count
        planned, peak = line["planned_bytes"], line["peak_bytes"]
        assert planned == pytest.approx(peak, rel=0.03), more  # objects of Python count too


DEEP = {
    "model_type": "llama", "vocab_size": 200, "hidden_size": 32, "intermediate_size": 32,
    "num_hidden_layers": 12, "num_attention_heads": 4, "num_key_value_heads": 4,
    "max_position_embeddings": 256, "eos_token_id": 2,
}  # fmt: skip
SCORES = {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1}
JUDGE = DEEP | SCORES | {"num_hidden_layers": 1, "intermediate_size": 2048, "vocab_size": 5000}


@pytest.mark.parametrize("case", ["caches", "logits", "judge"])
def test_rollouts_hold_what_is_planned(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values, logits of a large vocabulary, or a reward model's pass.

    On one thread: a plan counts blocks of attention that may run at the same time.
    """
    monkeypatch.setattr(threads, "count", lambda: 1)
    prompts, samples, asked, new, held = 8, 4, 60, 8, list[Any]()
    config = DEEP | ({"vocab_size": 6000, "num_hidden_layers": 1} if case == "logits" else {})
    model = create(config, seed=0)
    method: Any = Settings(method="grpo", samples=samples, max_new_tokens=new).learning.sized(
        config
    )
    if case == "judge":
        reward = RewardModel("judge", 1.0, Path(), parse(JUDGE))
        method, judge = dataclasses.replace(method, rewards=(reward,)), create(JUDGE, seed=0)
        held += judge.parameters.values()
    rows = prompts, asked + new
    plan = plan_memory(
        config, batch=rows[0], tokens=rows[1], dtype="float32", rank=2, optimizer="none",
        device="cpu", objective=method,
    )  # fmt: skip
    (planned,) = (each.total for each in plan.moments if each.op == "rollouts")

    def drawn() -> None:
        if case == "judge":
            whole = [np.zeros(asked + new, np.int64)] * (prompts * samples)
            dataclasses.replace(reward, model=judge)._scores(whole)
        else:
            each = [np.full(asked, 5)] * prompts
            model.rollouts(each, samples=samples, max_new_tokens=new, seed=0, stop=())

    drawn()  # what is imported, and kept by shapes, does not count
    adapter = new_adapter(parse(config), 2).parameters.values()
    more = sum(array.nbytes for array in adapter)
    gc.collect()  # what earlier tests left is not freed while this one measures
    with memory_pool(None, None, held=[*model.parameters.values(), *held]) as pool:
        pool.reset_peak()
        drawn()
        measured = pool.peak + more
        assert planned == pytest.approx(measured, rel=0.02)  # objects of Python count too


@pytest.mark.parametrize(
    ("method", "more", "clipped", "ratio"),
    [
        ("grpo", 0, 3 / 5, 5.1 / 5),
        ("grpo", 1, 3 / 5, 5.1 * np.e / 5),
        ("rloo", 0, 0, (1.3 * 1.3 * 0.5 + 0.7 * 1.3) / 2),
        ("rloo", 1, 1 / 2, (1.3 * 1.3 * 0.5 * np.e**3 + 0.7 * 1.3 * np.e**2) / 2),
    ],
)
def test_ratios_that_the_loss_clips_are_counted(
    method: str, more: float, clipped: float, ratio: float, home: Path
) -> None:
    """On the side that the advantage favours alone, and of rloo those of whole answers."""
    given = Settings(method=method, reward=[f"{home}/rewards.py:low"]).learning
    rows = np.log(np.array([[1.3, 1.3, 0.5], [0.7, 1.3, 9.0]], np.float32)) + np.float32(more)
    mask = np.array([[True, True, True], [True, True, False]])
    gains = np.array([1.0, -1.0], np.float32)
    sums = given._sums(rows, mask, 0 * rows, None, gains, 3.0, len(rows))
    measured = given.measures(sums)
    expected = {"entropy": 3 / 5, "clipped": clipped, "ratio": ratio, "length": 2.5}
    assert measured == pytest.approx(expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"pack": False, "dtype": "bfloat16", "temperature": 0.7},
        {"lora": Lora(4), "beta": 0.1, "recompute_every": 1},
        {"method": "rloo", "chunked_mlp": True, "accumulate": 2},
    ],
    ids=str,
)
def test_ratios_of_a_step_on_policy_are_one(
    more: Any, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each token has the log-probability that it was drawn by, in every bit."""
    seen, sums = [], Policy._sums

    def noted(self: Policy, rows: Any, mask: Any, old: Any, *others: Any) -> Any:
        seen.append((rows[mask], old[mask]))
        return sums(self, rows, mask, old, *others)

    monkeypatch.setattr(Policy, "_sums", noted)
    options = {"steps": 2, "batch": 3, "invariant": True, **more}
    made = trainer(home, tmp_path / "run", **options).train()
    assert len(seen) == 2 * options.get("accumulate", 1)
    for now, old in seen:
        assert now.size > 12
        np.testing.assert_array_equal(now, old)
    first = next(line for line in made.files.lines() if "clipped" in line)
    assert first["clipped"] == 0
    assert json.loads((tmp_path / "run" / "settings.json").read_text())["invariant"] is True


def test_logits_that_are_not_finite_end_the_run(home: Path, tmp_path: Path) -> None:
    model = load(home / "model", dtype="float32")
    model.parameters["model.norm.weight"][:] = np.nan
    model.save(tmp_path / "broken")
    (tmp_path / "broken" / "tokenizer.json").write_text(golden.tokenizer().to_str())
    with pytest.raises(
        ConfigError, match=r"after step 0: rollouts: the logits of new token 0 contain"
    ):
        trainer(home, tmp_path / "run", model=tmp_path / "broken").train()


@pytest.mark.parametrize(
    ("row", "prompt", "columns"),
    [
        ({"prompt": "a b", "answer": "c"}, "a b", {"answer": "c"}),
        ({"prompt": "a", "completion": "c", "label": 1}, "a", {"completion": "c", "label": 1}),
        ({"question": "a", "answer": "c"}, [("user", "a")], {"answer": "c"}),
        ({"Instruction": "a", "input": "b", "n": None}, [("user", "a\n\nb")], {"n": None}),
        ({"problem": "a", "system": "s"}, [("system", "s"), ("user", "a")], {}),
        ({"prompt": [{"role": "user", "content": "a"}], "score": 3}, [("user", "a")], {"score": 3}),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
                          {"role": "user", "content": "c"}]},
            [("user", "a"), ("assistant", "b"), ("user", "c")], {},
        ),
        ({"conversations": [{"from": "human", "value": "a"}], "x": 1}, [("user", "a")], {"x": 1}),
    ],
)  # fmt: skip
def test_prompts_of_every_form(row: Any, prompt: Any, columns: Any, tmp_path: Path) -> None:
    data = read_data(write(tmp_path / "a.jsonl", [row, {"prompt": "e"}]), method="grpo")
    (record,) = (each for each in (*data.train, *data.held_out) if each.line == 1)
    said = [(each["role"], each["content"]) for each in record.messages] or record.prompt
    assert (said, record.value) == (prompt, columns)
    assert all(each.keys() == {"role", "content"} for each in record.messages)
    assert record.answer == ""


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"text": "a"}, "has the columns text; write prompt, and columns for the rewards"),
        ({"answer": "a"}, "has the columns answer; write prompt"),
        ([1], "is \\[1\\], not an object"),
        ({"prompt": 3}, "prompt is 3, not text"),
        ({"prompt": "a", "completions": []}, "has completions, a parameter of reward functions"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
         "messages ends with an answer; end it with the question"),
        ({"messages": [{"role": "judge", "content": "a"}]}, "has the role judge"),
        ({"messages": []}, "messages has no message; end it with the question"),
    ],
)  # fmt: skip
def test_rows_that_ask_nothing_are_refused(row: Any, said: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "a"}, row])
    with pytest.raises(ConfigError, match=f"a.jsonl:2: .*{said}"):
        read_data(path, method="grpo")


def test_prompts_are_for_these_methods(home: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    with pytest.raises(
        ConfigError, match="or choose the method grpo or rloo, which trains on prompts"
    ):
        read_data(path)
    with pytest.raises(ConfigError, match=r"choose the method grpo or rloo, or write the"):
        read_data(write(tmp_path / "b.jsonl", [{"prompt": "a", "ground_truth": "2"}] * 2))
    many = write(tmp_path / "many.jsonl", [{"prompt": f"w{n}"} for n in range(1500)])
    assert len(read_data(many, method="grpo").held_out) == 100


def test_a_prompt_leaves_room_for_its_answer(home: Path, tmp_path: Path) -> None:
    made, _ = calls(home, trainer(home, tmp_path / "run", tokens=11))
    assert made.loop is not None
    lengths = [len(golden.tokenizer().encode(row["prompt"]).ids) for row in asked()]
    note = made.loop.training_data.note
    assert f"sampling answers to {sum(n <= 5 for n in lengths)} of 6 prompts, " in note
    assert f"{sum(n > 5 for n in lengths)} dropped: no room for max_new_tokens" in note
    with pytest.raises(ConfigError, match=r"leaves room for max_new_tokens=6 within tokens=7; inc"):
        trainer(home, tmp_path / "none", tokens=7).train()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"reward": []},
            "method=grpo needs a reward; give reward, FILE.py:FUNCTION or the folder of a",
        ),
        ({"reward": "a.py:b"}, "Settings(reward='a.py:b'): reward must be a list, each a text"),
        ({"beta": 0.1}, "beta of method=grpo compares with the initial model"),
        ({"neftune": 5.0}, "samples its answers without neftune"),
        ({"lora": 2, "lora_dropout": 0.1}, "samples its answers without lora_dropout"),
        (
            {"tensor_parallel": 2, "invariant": True},
            "invariant needs an undivided model; use data_parallel in place of tensor_parall",
        ),
        (
            {"expert_parallel": 2},
            "expert_parallel=2 does not work with method=grpo, whose",
        ),
        ({"steps_per_generation": 3, "accumulate": 2}, "=3 is not a multiple of accumulate=2"),
        ({"reward_seconds": 0.0}, "reward_seconds=0.0: give a number above 0"),
        (
            {"reward": ["tests"], "reward_seconds": 9.0},
            "reward_seconds limits functions in files, and reward names none; leave it out",
        ),
        ({"method": "dpo", "reward": (), "num_iterations": 2}, "dpo does not use num_iterations"),
        ({"method": "rloo", "beta": 0.1}, "method=rloo does not use beta"),
        ({"method": "rloo", "loss": "dapo"}, "method=rloo does not use loss"),
        ({"loss": "sigmoid"}, "has no loss=sigmoid; choose from dapo, grpo, dr_grpo, luspo"),
        ({"samples": 1}, "samples=1: give a whole number of 2 or more"),
        ({"method": "dpo", "reward": (), "invariant": True}, "method=dpo does not use invariant"),
    ],
)
def test_settings_that_do_not_fit(settings: Any, said: str, home: Path) -> None:
    usual = {"method": "grpo", "reward": [f"{home}/rewards.py:low"]}
    with pytest.raises(ConfigError, match=re.escape(said)):
        Settings(**usual | settings).check(home / "model", lines=True)


def test_what_a_run_says(home: Path, tmp_path: Path) -> None:
    """Measures are in lines, progress, table and picture; functions get chats as messages."""
    rows = [{"question": each["prompt"], "answer": "x"} for each in asked()]
    write(tmp_path / "chats.jsonl", rows)
    (tmp_path / "own.py").write_text(
        "def ends(prompts, completions):\n"
        "    assert all(each[-1]['role'] == 'user' for each in prompts)\n"
        "    return [len(each[0]['content']) / 9 for each in completions]\n"
    )
    words = ("finetune", home / "model", "--data", tmp_path / "chats.jsonl", "--method", "grpo")
    words += ("--max-new-tokens", 3, "--batch", 2, "--samples", 2, "--steps", 1)
    done = run(*words, "--reward", f"{tmp_path}/own.py:ends", "--out", tmp_path / "run")
    assert done.exit_code == 0, done.output
    assert "sampling answers to 5 prompts, rewarded by ends" in done.output
    assert (
        "each sampling pass generates 4 answers of at most 3 tokens, with a KV cache of"
        in done.output
    )
    assert re.search(r"step 1/1: evaluation loss -\S+, reward \S+, length \d.\d", done.output)
    assert "evaluation reward" in done.output
    assert_one_clear_error(run(*words, "--out", tmp_path / "none"), "--method grpo needs a reward")
    measured = ("evaluate", tmp_path / "run", "--data", tmp_path / "chats.jsonl")
    cure = "finetune --method grpo --eval FILE measures them"
    assert_one_clear_error(
        run(*measured, "--method", "grpo"), f"--method grpo needs rewards; {cure}"
    )
    shown = run("data", home / "prompts.jsonl", "--method", "grpo", "--model", home / "model")
    assert "5 prompts for training, 1 for evaluation" in shown.output
    assert "learned" not in shown.output
    planned = run("plan", home / "model", "--method", "grpo", "--samples", 4, "--tokens", 20)
    assert "grpo on prompts" in planned.output


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [{}, {"pack": False}], ids=["packed", "rows"])
def test_a_mixture_learns_from_the_experts_that_drew(
    options: dict[str, Any], home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each token of an answer, and of its prompt; the last of a text chooses anew."""
    config = json.loads((home / "model" / "config.json").read_text())
    kinds = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "eos_token_id")
    heads = ("num_attention_heads", "num_key_value_heads")
    mixture = create({**{name: config[name] for name in (*kept, *heads)}, **kinds}, seed=0)
    mixture.save(tmp_path / "mixture")
    shutil.copy(home / "model" / "tokenizer.json", tmp_path / "mixture")
    drawn, given = [], []
    rollouts, log_probs = Transformer.rollouts, Transformer.log_probs

    def draw(self: Any, *args: Any, **named: Any) -> Any:
        drawn.append(rollouts(self, *args, **named))
        return drawn[-1]

    def learn(self: Any, **named: Any) -> Any:
        given.append(named)
        return log_probs(self, **named)

    monkeypatch.setattr(Transformer, "rollouts", draw)
    monkeypatch.setattr(Transformer, "log_probs", learn)
    made = trainer(home, tmp_path / "run", model=tmp_path / "mixture", **options).train()
    assert made.files.lines()[1]["clipped"] == 0
    (batch,) = (each for each in given if each.get("routes") is not None)
    answers = next(each for each in drawn if each.routes.shape[0] == 24)
    rows = [row[real] for row, real in zip(answers.routes, answers.real, strict=True)]
    if batch["offsets"] is None:
        texts = [row[: len(own)] for row, own in zip(batch["routes"], rows, strict=True)]
    else:
        texts = np.split(batch["routes"][0], batch["offsets"][1:-1])
    for text, own in zip(texts, rows, strict=True):
        np.testing.assert_array_equal(text, own)
        assert (own[:-1] >= 0).all()
