"""What saves memory costs no quality: a fine-tune with each saving, and one without.

UNSLOTH_CUPY_FULL_RUNS=1200 takes as many steps, of rows as long as those of ``finetune`` (minutes a
run); else there are few, of short rows.  ``-s`` shows the losses.
"""

import json
import os
from pathlib import Path
from typing import Any

import click.testing
import pytest

from unsloth_cupy import Tape, cross_entropy, linear
from unsloth_cupy.cli.commands import group
from unsloth_cupy.finetune.data import training_data
from unsloth_cupy.finetune.data.text import held_out_rows
from unsloth_cupy.finetune.run import printer
from unsloth_cupy.models import loss
from unsloth_cupy.models.layers import mlp_branch
from unsloth_cupy.training.chunks import in_chunks

FULL = int(os.environ.get("UNSLOTH_CUPY_FULL_RUNS", "0"))  # steps
BATCH, TOKENS, STEPS = (4, 128, FULL) if FULL else (2, 64, 16)
EVALUATED = 10**9 if FULL else 16  # rows of the held-out text, at most
PROMISE = 1e-2  # the share of the held-out loss by which, as the guide says, no saving moves it

used: set[str] = set()  # what a run has called of the two whose use is looked at


class WholeLogits:
    """In the place of linear_cross_entropy_gradients: all logits at once, their gradient beside."""

    __name__ = "whole_logits"
    contract = loss.linear_cross_entropy_gradients.contract
    names = loss.linear_cross_entropy_gradients.names

    @staticmethod
    def call(arrays: list[Any], options: dict[str, Any]) -> tuple[Any, ...]:
        used.add("whole logits")
        *inputs, labels, share, class_weights = arrays
        assert class_weights is None
        tape = Tape()
        watched = [tape.watch(array) for array in inputs]
        how = {name: options[name] for name in ("ignore", "softcap")}
        losses = cross_entropy(linear(*watched), labels, **how)
        return losses.value, *tape.gradients(losses, watched, share)


def watched_mlp(*arguments: Any, **options: Any) -> Any:
    used.add("chunks")
    return in_chunks(*arguments, **options)


def some_rows(tokens: Any, *, batch: int, length: int) -> Any:
    return held_out_rows(tokens, batch=batch, length=length)[: EVALUATED // batch]


HALVES = ("--batch", str(BATCH // 2), "--accumulate", "2")
EIGHT_BITS = ("--state-bits", "8")
CHUNKED = ("--chunked-mlp",)
SAVINGS: dict[str, tuple[str, ...]] = {
    "whole logits": (),  # the saving is on in all others
    "checkpoints": ("--recompute-every", "1"),
    "checkpoints of 2 blocks": ("--recompute-every", "2"),
    "chunked MLP": CHUNKED,
    "bfloat16": ("--dtype", "bfloat16"),
    "float16": ("--dtype", "float16"),
    "8-bit states": EIGHT_BITS,
    "accumulated halves": HALVES,
    "all": (*CHUNKED, "--recompute-every", "1", "--dtype", "bfloat16", *EIGHT_BITS, *HALVES),
}


def prepare(patch: pytest.MonkeyPatch) -> None:
    used.clear()
    patch.setattr(mlp_branch, "in_chunks", watched_mlp)
    patch.setattr(printer, "draw_curve", lambda *_: None)
    patch.setattr(printer, "sample", lambda *_: None)
    patch.setattr(training_data, "held_out_rows", some_rows)


def held_out_loss(folder: Path, *more: str) -> float:
    """Train the default model; return its loss on the text it has not seen."""
    plain = ("--steps", STEPS, "--batch", BATCH, "--tokens", TOKENS, "--evaluate-every", STEPS)
    arguments = ["finetune", "--out", folder, *plain, *more]
    done = click.testing.CliRunner().invoke(group, [str(a) for a in arguments])
    assert done.exit_code == 0, done.output
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    by_step = [line["held_out_loss"] for line in lines if "held_out_loss" in line]
    assert by_step[-1] < by_step[0] - 0.5, "it learned"
    return float(by_step[-1])


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> float:
    """The loss of a run in float32 with everything kept."""
    with pytest.MonkeyPatch.context() as patch:
        prepare(patch)
        return held_out_loss(tmp_path_factory.mktemp("plain") / "run")


@pytest.mark.slow
@pytest.mark.parametrize("saving", SAVINGS)
def test_a_saving_moves_no_held_out_loss(
    saving: str, wanted: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, whole = SAVINGS[saving], saving == "whole logits"
    prepare(monkeypatch)
    if whole:
        monkeypatch.setattr(loss, "linear_cross_entropy_gradients", WholeLogits)
    actual = held_out_loss(tmp_path / "run", *options)
    assert ("whole logits" in used) == whole
    assert ("chunks" in used) == ("--chunked-mlp" in options)
    print(f"\n{saving}: {actual:.4f}, without {wanted:.4f}: {actual / wanted - 1:+.3%}")
    assert abs(actual - wanted) <= PROMISE * wanted
