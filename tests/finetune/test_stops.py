"""A run stops where a value is not finite, says where that began, and keeps the last good state."""

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from unsloth_cupy.errors import ConfigError, NotFiniteError
from unsloth_cupy.finetune import Settings
from unsloth_cupy.finetune.data.text import Batch
from unsloth_cupy.finetune.methods.registry import METHODS
from unsloth_cupy.finetune.run import loop
from unsloth_cupy.finetune.run.loop import Loop
from unsloth_cupy.finetune.run.run_folder import RunFolder
from unsloth_cupy.training.find_nan import NonFiniteError

from ..cli.test_cli import assert_one_clear_error, numbers, run, weights

SMALL = (
    "--steps", "8", "--batch", "2", "--tokens", "16", "--layers", "1", "--hidden", "32",
    "--vocabulary", "300", "--evaluate-every", "9", "--lr", "0.01",
)  # fmt: skip


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "numbers.txt"
    path.write_text("\n\n".join(f"{i} and {i * i} are numbers." for i in range(200)))
    return path


@pytest.fixture(scope="session")
def finished(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "whole"
    result = run("finetune", "--text", text, "--out", folder, *SMALL)
    assert result.exit_code == 0, result.output
    return folder


def stopped(*arguments: Any) -> Any:
    with np.errstate(all="ignore"):
        return run("finetune", *arguments)


def explode(patch: pytest.MonkeyPatch, at: int) -> None:
    """Let the rate of one step be far too large."""
    rate = loop.rate_of
    patch.setattr(loop, "rate_of", lambda step, plan: 1e25 if step == at else rate(step, plan))


@pytest.mark.slow
def test_looking_changes_no_bit(finished: Path, text: Path, tmp_path: Path) -> None:
    result = run("finetune", "--text", text, "--out", tmp_path / "run", *SMALL, "--find-nan")
    assert result.exit_code == 0, result.output
    assert weights(tmp_path / "run") == weights(finished)
    assert numbers(tmp_path / "run") == numbers(finished)


@pytest.mark.parametrize("every", [1, 9], ids=["held out", "learned"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_broken_weight_is_named(
    value: float, every: int, finished: Path, text: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    name = "model.layers.0.mlp.up_proj.weight"
    tensors = load_file(finished / "model" / "model.safetensors")
    tensors[name][3, 4] = value
    for path in (finished / "model").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    save_file(tensors, tmp_path / "model.safetensors")
    options = (tmp_path, "--text", text, "--steps", 2, "--batch", 2, "--tokens", 16)
    if every == 9:  # as if nothing were held out
        monkeypatch.setattr(Loop, "_evaluate", lambda *_: None)
    where = "step 1: batch 0 (rows from tokens" if every > 1 else "after step 0: evaluation batch"
    result = stopped(*options, "--out", tmp_path / "run", "--find-nan")
    assert_one_clear_error(
        result, where, f"linear at {name} returned the first value that is not finite: y (2, 16, ",
        f"not finite before: weight ({name})", "copy the model again",
    )  # fmt: skip
    result = stopped(*options, "--out", tmp_path / "run")
    assert_one_clear_error(
        result, where.partition(":")[0], "loss is nan", "use --find-nan to see the"
    )


@pytest.mark.slow
def test_the_batch_names_its_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    explode(monkeypatch, 3)
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(f'{{"text": "{i} and {i + 1}."}}\n' for i in range(60)))
    result = stopped("--text", path, "--out", tmp_path / "run", *SMALL, "--find-nan")
    assert_one_clear_error(result, "step 4: batch 3 (lines ", " of lines.jsonl): ", "all its arg")


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--find-nan",), ("--accumulate", 2, "--find-nan")])
def test_the_last_good_state_is_kept(
    more: Any, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that explode are saved before a loss can show it: the state before them stays."""
    folder = tmp_path / "run"
    command = ("--text", text, "--out", folder, *SMALL, "--save-every", 1, *more)
    with monkeypatch.context() as patch:
        explode(patch, 4)
        result = stopped(*command)
    good = folder / "checkpoint-00000003"
    assert_one_clear_error(result, "step 5: ", f"the last good checkpoint is {good}")
    assert ("batch 8 (" if "--accumulate" in more else "batch 4 (") in result.stderr or not more
    actual = [path.name for path in RunFolder(folder).checkpoints()]
    assert actual == ["checkpoint-00000003", "checkpoint-00000004"]
    assert all(np.isfinite(a).all() for a in load_file(good / "model.safetensors").values())
    again = stopped(*command)  # from the newest: it says the same, and keeps the same
    assert_one_clear_error(again, "step 5: ", f"the last good checkpoint is {good}")
    rest = ("--steps", 2, "--batch", 2, "--tokens", 16, "--lr", 0.001)
    assert stopped(good, "--text", text, "--out", tmp_path / "new", *rest).exit_code == 0


@pytest.mark.slow
def test_weights_that_are_not_finite_are_not_saved(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Loop._one_step

    def overflowing(self: Loop) -> None:
        step(self)
        if self.step == 4:
            next(iter(self.checkpoints.part().trained.values()))[0, 0] = np.inf

    monkeypatch.setattr(Loop, "_one_step", overflowing)
    folder = tmp_path / "run"
    result = stopped("--text", text, "--out", folder, *SMALL, "--save-every", 2)
    assert_one_clear_error(result, "after step 4: the weight model.embed_tokens.weight is not")
    assert [path.name for path in RunFolder(folder).checkpoints()] == ["checkpoint-00000002"]


@pytest.mark.slow
def test_one_checkpoint_is_left_once_it_is_known_to_be_good(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []
    step = Loop._one_step

    def looking(self: Loop) -> None:
        step(self)
        seen.append([path.name[-1] for path in self.run.checkpoints()])

    monkeypatch.setattr(Loop, "_one_step", looking)
    options = (*SMALL, "--save-every", 2)
    assert run("finetune", "--text", text, "--out", tmp_path / "run", *options).exit_code == 0
    assert seen == [[], [], ["2"], ["2"], ["4"], ["4"], ["6"], ["6"]]


@pytest.mark.slow
def test_skipped_steps_of_float16_are_no_error(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scaler shrinks its scale where gradients overflow; looking for NaN does not stop that."""
    from unsloth_cupy.training.precision import MixedPrecisionConfig

    scaler = MixedPrecisionConfig.scaler

    def large(self: MixedPrecisionConfig) -> Any:
        made = scaler(self)
        made.value = 2.0**28
        return made

    monkeypatch.setattr(MixedPrecisionConfig, "scaler", large)
    options = (*SMALL, "--dtype", "float16")
    logs = []
    for name, more in (("plain", ()), ("looking", ("--find-nan",))):
        result = run("finetune", "--text", text, "--out", tmp_path / name, *options, *more)
        assert result.exit_code == 0, result.output
        assert not re.search("Warning", result.output)
        logs.append(numbers(tmp_path / name))
    assert logs[0] == logs[1]
    assert logs[0][-2]["skipped_steps"] > 0


# ---- rules of the loop --------------------------------------------------------------------------
class Fake(SimpleNamespace):
    """The state that a method of ``Loop`` reads; other methods are those of ``Loop``."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(Loop, name)
        return found.fget(self) if isinstance(found, property) else partial(found, self)


def state(**values: Any) -> Any:
    """Return a loop of which these values are set."""
    each: dict[str, Any] = {
        "plan": Settings(lr=0.5).decided(new=True), "step": 4,
        "scaler": SimpleNamespace(dynamic=True, value=2.0, minimum=1.0),
        "checkpoints": SimpleNamespace(last_good=lambda: None),
        "model": SimpleNamespace(parameters={}, trainable={}, adapter=None),
        "ranks": SimpleNamespace(first=True, broadcast=lambda value: value),
        "training_data": SimpleNamespace(batches=SimpleNamespace(where="at {}".format)),
        "method": METHODS["sft"],
    }  # fmt: skip
    return Fake(**each | values)


def test_the_end_of_a_run_names_step_cure_and_checkpoint() -> None:
    good = SimpleNamespace(last_good=lambda: Path("run/checkpoint-00000002"))
    plan = Settings(lr=0.5, find_nan=True).decided(new=True)
    still = SimpleNamespace(dynamic=False)
    more = "; use find_nan to see the layer where it begins"
    cure = "try a smaller lr than 0.5"
    copy = "copy the model again"
    for loop_, after, expected in (
        (state(), False, f"step 5: wrong; {cure}{more}"),
        (state(), True, f"after step 4: wrong; {cure}{more}"),
        (state(plan=plan), False, f"step 5: wrong; {cure}"),
        (state(plan=plan, checkpoints=good), False,
         f"step 5: wrong; {cure}; the last good checkpoint is run/checkpoint-00000002"),
        (state(plan=plan, step=0, scaler=still), False,
         f"step 1: wrong; use smaller numbers in the data, or {copy}"),
        (state(plan=plan, step=0), True, "after step 0: wrong; use smaller numbers in the data, or"
         f" {copy}, or try dtype=bfloat16"),
    ):  # fmt: skip
        if loop_.step == 0:
            loop_._smaller = lambda: "use smaller numbers in the data, or "
        with pytest.raises(ConfigError) as error:
            loop_._stop("wrong", after=after)
        assert str(error.value) == expected


def test_large_numbers_of_the_data_are_named_before_the_model() -> None:
    def smaller(value: Any = None, weight: float = 1.0, **more: Any) -> str:
        beside = {} if value is None else {"value": np.array([0.0, value])}
        batches = [SimpleNamespace(beside={}), SimpleNamespace(beside=beside)]
        data = SimpleNamespace(batches=SimpleNamespace(at=batches.__getitem__))
        plan = Settings(accumulate=2).decided(new=True)
        model = SimpleNamespace(parameters={"a": np.ones(2)}, trainable={"b": np.array([weight])})
        said: str = state(plan=plan, model=model, training_data=data, **more)._smaller()
        return said

    assert smaller(1e15) == smaller() == ""
    for value in (2e15, -2e15):
        assert smaller(value) == "use smaller numbers in the data, or "
    assert smaller(2e15, weight=np.nan) == "", "the model is at fault"
    assert smaller(method=SimpleNamespace(is_on_policy=True)) == "use smaller rewards, or "
    assert smaller(np.nan, method=METHODS["sft"]) == ""


@pytest.mark.parametrize(
    ("dynamic", "value", "expected"), [(True, 2.0, True), (True, 1.0, False), (False, 2.0, False)]
)
def test_a_scale_may_shrink_to_its_least(dynamic: bool, value: float, expected: bool) -> None:
    scaler = SimpleNamespace(dynamic=dynamic, value=value, minimum=1.0)
    assert state(scaler=scaler)._scale_may_shrink == expected


@pytest.mark.parametrize("held_out", [False, True])
@pytest.mark.parametrize("shrinks", [False, True])
def test_values_are_looked_at_if_a_run_asks_for_it(
    shrinks: bool, held_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[Any]()

    @contextmanager
    def looks(parameters: Any, *, gradients: bool) -> Iterator[None]:
        seen.append((parameters, gradients))
        yield

    monkeypatch.setattr(loop, "find_nan", looks)
    with state()._watched(3):
        pass
    assert seen == []
    plan = Settings(find_nan=True).decided(new=True)
    model = SimpleNamespace(parameters={"a": 1}, trainable={"b": 2})
    scaler = SimpleNamespace(dynamic=shrinks, value=2.0, minimum=1.0)
    each = state(plan=plan, model=model, scaler=scaler)
    where = "after step 4: evaluation batch 3: nan" if held_out else "step 5: batch 3 (at 3): nan"
    with pytest.raises(ConfigError, match=re.escape(where)), each._watched(3, held_out=held_out):
        raise NonFiniteError("nan", "op", "y", None)
    assert seen == [({"a": 1, "b": 2}, not shrinks)]
    where = "after step 4: nan" if held_out else "step 5: nan"
    for error in (NonFiniteError("nan", "op", "y", None), NotFiniteError("nan")):
        with pytest.raises(ConfigError, match=f"^{where}"), each._finite(after=held_out):
            raise error


@pytest.mark.parametrize(
    ("pads", "settings", "drops", "padded"),
    [
        (True, {"method": "dpo"}, False, True), (False, {"method": "dpo"}, False, False),
        (True, {"method": "sft"}, False, False), (True, {"method": "dpo"}, True, True),
        (True, {"method": "dpo", "pack": False}, False, True),
        (True, {"method": "dpo", "pack": False}, True, False),
        (True, {"method": "dpo", "pack": False, "neftune": 5.0}, False, False),
        (True, {"method": "dpo", "pack": True, "neftune": 5.0}, False, True),
    ],
)  # fmt: skip
def test_passes_of_a_step(pads: bool, settings: Any, drops: bool, padded: bool) -> None:
    """Batches of a step are padded for graphs, unless draws depend on the padded length."""
    events = list[Any]()

    class Steps:
        pads, drops, stages = True, False, None

        def gradients(self, own: Any, step: Any, numbers: Any, noise: float, starts: Any) -> Any:
            events.append((own, [*numbers], noise, [*starts]))
            return iter([(2.0, {}), (3.0, {})])

        def summed(self, passes: Any, count: int) -> Any:
            return sum(loss for loss, _ in passes) / count, {"a": 1}

    executor: Any = Steps()
    executor.pads, executor.drops = pads, drops
    batches = {n: Batch(np.full((1, n), n), np.full((1, n), n), None, 1, n) for n in (6, 7)}
    none = np.zeros((1, 0))
    method = SimpleNamespace(
        first=lambda step, accumulate: step * accumulate, is_on_policy=False, sums=0,
        before=lambda model, rows, _: {"beta": len(rows)}, constants=("beta",),
        padded=lambda batch: batch._replace(real=-1),
        counts=lambda batches: {"count": len(batches)},
        inputs=lambda batch: {"tokens": batch.tokens if batch.real > 0 else -batch.tokens},
        joined=lambda parts, replicas: parts, measures=lambda parts, **numbers: numbers,
    )  # fmt: skip

    def rows(batch: Batch, *, before: bool = False) -> Batch:
        return (
            batch._replace(tokens=batch.tokens[:, :3] if batch.real == 7 else none)
            if before
            else batch
        )

    ranks = SimpleNamespace(rows=rows, replicas=SimpleNamespace(all_reduce=None))
    each = state(
        plan=Settings(accumulate=2, **settings).decided(new=False), step=3, executor=executor,
        method=method, ranks=ranks, model=SimpleNamespace(table=none),
        training_data=SimpleNamespace(batches=SimpleNamespace(at=batches.__getitem__)),
        stop=SimpleNamespace(check=lambda: events.append("check")),
        callbacks=SimpleNamespace(call=events.append),
        routing=SimpleNamespace(counting=nullcontext),
    )  # fmt: skip
    loss, count, sums = each._gradients()
    assert (loss, count, sums) == (2.5, 13, {"a": 1})
    assert each.measured == {"beta": 2}
    (own, numbers, noise, starts), *rest = events
    assert numbers == [6, 7]
    assert noise == settings.get("neftune", 0.0)
    draws = drops or bool(noise)
    assert starts == ([0, 3] if draws else [])
    assert rest == ["check", "on_substep_end", "check"], "a step ends its last pass"
    sign = -1 if padded else 1
    assert [batch["tokens"][0, 0] * sign for batch in own] == [6, 7]
    assert [(batch["count"], batch["beta"]) for batch in own] == [(2, 2)] * 2
    assert [type(batch["count"]) for batch in own] == [np.ndarray if padded else int] * 2


def test_answers_are_drawn_once_for_the_steps_that_share_them() -> None:
    answers, drawn = list[str](), list[Any]()

    def draw(loop_: Any, prompts: Any, numbers: Any) -> list[str]:
        drawn.append((prompts, [*numbers]))
        return [f"answer {number}" for number in numbers]

    method = SimpleNamespace(
        updates=lambda accumulate: 2, drawn=draw,
        drawn_with=lambda number: range(number // 4 * 4, number // 4 * 4 + 4),
    )  # fmt: skip
    data = SimpleNamespace(batches=SimpleNamespace(at=lambda number: f"prompt {number}"))
    each = state(method=method, checkpoints=SimpleNamespace(answers=answers), training_data=data)
    for each.step, first, count in ((0, 0, 1), (1, 2, 1), (2, 4, 2)):
        assert each._drawn(range(first, first + 2)) == [f"answer {first}", f"answer {first + 1}"]
        assert len(drawn) == count
        assert len(answers) == 4
    assert drawn[1] == ([f"prompt {n}" for n in range(4, 8)], [4, 5, 6, 7])


@pytest.mark.parametrize("forms", [0, 1])
def test_an_evaluation_takes_the_memory_of_graphs(forms: int) -> None:
    cleared = list[int]()
    graphs = SimpleNamespace(by_form=[1] * forms, clear=lambda: cleared.append(1))
    one, two = (SimpleNamespace(replicas=SimpleNamespace(size=size)) for size in (1, 2))
    calls = list[int]()

    def held_out() -> dict[str, int]:
        calls.append(1)
        if len(calls) == 1:
            raise MemoryError
        return {"held_out_loss": len(calls)}

    each = state(model=SimpleNamespace(graphs=graphs), ranks=one, _held_out=held_out)
    if forms:
        assert each._evaluated() == {"held_out_loss": 2}
    else:
        with pytest.raises(MemoryError):
            each._evaluated()
    assert len(cleared) == forms
    calls[:] = [1]
    assert each._evaluated() == {"held_out_loss": 2}
    assert len(cleared) == forms, "they are kept where there is room"
    each.ranks = two
    assert each._evaluated() == {"held_out_loss": 3}
    assert len(cleared) == forms + 1
    each.ranks, each.method = one, SimpleNamespace(is_on_policy=True, evaluated=lambda _: "own")
    assert each._evaluated() == "own"
    assert len(cleared) == forms + 2


@pytest.mark.parametrize(("step", "now", "known", "due"), [
    (4, False, False, True), (4, False, True, False), (5, False, False, False),
    (5, True, False, True), (5, True, True, False), (10, False, False, True),
])  # fmt: skip
def test_an_evaluation_is_due_once(step: int, now: bool, known: bool, due: bool) -> None:
    done = list[int]()
    each = state(
        step=step, plan=Settings(steps=10, evaluate_every=4).decided(new=True),
        run=SimpleNamespace(evaluated=lambda _: known), _evaluate=lambda: done.append(1),
        checkpoints=SimpleNamespace(averages=nullcontext),
        stop=SimpleNamespace(interruptible_block=lambda *_: nullcontext()),
    )  # fmt: skip
    each._evaluate_if_due(now=now)
    assert len(done) == due


@pytest.mark.parametrize(("loss", "best", "first", "saved"), [
    (2.0, None, True, 1), (2.0, 3.0, True, 1), (2.0, 2.0, True, 0), (3.0, 2.0, True, 0),
])  # fmt: skip
def test_the_best_model_is_saved(loss: float, best: float | None, first: bool, saved: int) -> None:
    written = list[Any]()
    line = None if best is None else {"held_out_loss": best}
    each = state(
        run=SimpleNamespace(best=lambda: line, best_model="best"),
        checkpoints=SimpleNamespace(write_model=lambda *given: written.append(given)),
        stop=SimpleNamespace(uninterruptible=written.append),
    )  # fmt: skip
    each._keep_if_best(loss)
    said = ["after saving the best model (step 4)", ("best", "float32")]
    assert written == said * saved


@pytest.mark.parametrize(
    ("settings", "names", "said"),
    [
        ({"steps": 3}, [], ""), ({"steps": 3, "merge_from": 2}, [], ""),
        ({"steps": 3, "merge_from": 3}, [], "merge_from=3: the run has only 3 steps, so it would"),
        ({"neftune": 1.0}, [], "neftune is not supported when ranks split the layers"),
        ({"embedding_lr": 0.1}, ["a.weight"], "embedding_lr=0.1: the run trains neither the embed"),
        ({"embedding_lr": 0.1}, ["model.embed_tokens.weight"], ""),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_a_model(settings: Any, names: Any, said: str) -> None:
    trainable = dict.fromkeys(names)
    for stages in (None, 2):
        each = state(
            plan=Settings(**settings).decided(new=False), executor=SimpleNamespace(stages=stages),
            model=SimpleNamespace(trainable=trainable),
        )  # fmt: skip
        if said and (stages or "neftune" not in settings):
            with pytest.raises(ConfigError, match=re.escape(said)):
                each.check()
        else:
            each.check()


@pytest.mark.parametrize(("weight", "adapted", "rounds", "fits"), [
    (0.5, True, False, True), (1 / 3, True, False, False), (1 / 3, False, True, False),
    (1 / 3, False, False, True),
])  # fmt: skip
def test_copies_of_16_bits_must_not_change_what_is_merged(
    weight: float, adapted: bool, rounds: bool, fits: bool
) -> None:
    into = SimpleNamespace(rounds=lambda *_: rounds)
    adapter = SimpleNamespace(into=into, adds_to=lambda _: adapted)
    whole = np.full(3, weight, np.float32)
    copies = {"a": whole.astype(np.float16)}
    plan = Settings(dtype="float16", lora=2, merge_into="nf4").decided(new=False)
    each = state(plan=plan, model=SimpleNamespace(adapter=adapter, parameters={"a": whole}))
    if fits:
        each._check_copies(copies)
    else:
        said = "merge_into rounds the weights of the model; the model's a is float32, which float16"
        with pytest.raises(ConfigError, match=said):
            each._check_copies(copies)
    adapter.into = None
    each._check_copies(copies)
    each.model.adapter = None
    each._check_copies(copies)
    for each.step, active in ((2, False), (3, True)):
        each.plan = replace(plan, merge_from=3)
        each.model.adapter, adapter.into = adapter, into
        each._settle()
        assert into.active == active


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("broken", [None, "a weight"])
def test_a_checkpoint_is_written_once(exists: bool, broken: str | None, tmp_path: Path) -> None:
    written = list[Any]()
    if exists:
        (tmp_path / "4").touch()
    each = state(
        seconds=7.0, stop=SimpleNamespace(uninterruptible=lambda _: None),
        callbacks=SimpleNamespace(call=written.append),
        checkpoints=SimpleNamespace(
            path=lambda step: tmp_path / str(step), broken=lambda: broken, last_good=lambda: None,
            write=lambda *given: written.append(given),
        ),
    )  # fmt: skip
    if broken:
        with pytest.raises(ConfigError, match="after step 4: the weight a weight is not finite"):
            each.save()
        return
    assert each.save() == tmp_path / "4"
    assert written == ([] if exists else [(4, 7.0), "on_save"])
