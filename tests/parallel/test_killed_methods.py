"""Runs of methods that are killed go on in equal bits, in one process and in ranks."""

import signal
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from unsloth_cupy.finetune import Run
from unsloth_cupy.finetune.methods.registry import METHODS
from unsloth_cupy.finetune.run.run_folder import RunFolder

from ..finetune import test_methods as methods
from ..finetune import test_policies as policies
from ..finetune.test_methods import GRIDS, data_of, log, model_of
from ..harness.sampling import Sample
from .ranks import by_sockets

home, answering = methods.home, policies.home  # fixtures
AGAIN = "--num-iterations 3"  # the checkpoint holds answers from which the next step learns
RUNS = (
    ("dpo", "one", ""),
    ("kto", "one", "--lora 2"),
    ("grpo", "one", AGAIN),
    ("rloo", "one", "--accumulate 2"),
    ("embed", "one", "--optimizer lion"),
    ("dpo", "data", "--dtype bfloat16"),
    ("dpo", "tensor", "--lora 2"),
    ("ipo", "pipeline", "--accumulate 2"),
    ("orpo", "chunks", "--accumulate 2 --optimizer schedulefree"),
    ("kto", "zero-3", "--batch 1 --accumulate 2"),
    ("distill", "context", ""),
    ("classify", "zero-1", ""),
    ("reward", "zero-3", ""),
    ("classify", "zero-3", "--lora 2"),
    ("grpo", "data", f"{AGAIN} --lora 2 --beta 0.1"),
    ("grpo", "tensor", AGAIN),
    ("rloo", "pipeline", "--steps-per-generation 4"),
)


@pytest.mark.slow
def test_methods_go_on_in_equal_bits(home: Path, answering: Path, tmp_path: Path) -> None:
    """A run is killed in step 3, after its checkpoint of step 2, and started again."""
    runs = Sample.one_in(5, RUNS)

    def asked(method: str, grid: str, more: str, out: str) -> list[str]:
        own = answering if METHODS[method].is_on_policy else home
        data = own / "prompts.jsonl" if METHODS[method].is_on_policy else data_of(own, method)
        model = own / "model" if METHODS[method].is_on_policy else model_of(own, method)
        given = {"--data": data, "--eval": data, "--method": method, "--lr": 1e-3, "--steps": 5}
        given |= {"--out": tmp_path / out / f"{method}-{grid}", "--batch": 3, "--tokens": 20}
        given |= {"--evaluate-every": 2, "--save-every": 2}
        if METHODS[method].is_on_policy:
            given |= {"--tokens": 40, "--samples": 4, "--max-new-tokens": 6}
            given |= {"--reward": f"{own}/rewards.py:low"}
        given |= {"--teacher": home / "model-0.9"} if method == "distill" else {}
        given |= {"--reference": home / "model-0.9"} if METHODS[method].compares else {}
        words = [str(word) for pair in given.items() for word in pair]
        return ["finetune", str(model), *words, *more.split(), *GRIDS.get(grid, "").split(), "--"]

    for ranks in (1, 2):
        own = [run for run in runs if (run[1] == "one") == (ranks == 1)]
        commands = list[str]()
        for run in own:
            ended = by_sockets(
                ranks, "tests.parallel.commands", "killed", "--", *asked(*run, "killed")[:-1]
            )
            assert ended[-1].code == -signal.SIGKILL, ended
            assert ranks == 1 or "rank 1 has failed: its connection ended" in ended[0].said, ended
            folder = tmp_path / "killed" / f"{run[0]}-{run[1]}"
            left = [path.name for path in RunFolder(folder).checkpoints()]
            assert left == ["checkpoint-00000002"]
            commands += [*asked(*run, "killed"), *asked(*run, "whole")]
        for ended in by_sockets(ranks, "tests.parallel.commands", *commands[:-1], limit=240):
            assert ended.code == 0, ended.said
    for method, grid, _ in runs:
        again, whole = (tmp_path / name / f"{method}-{grid}" for name in ("killed", "whole"))
        logs = [log(Run("", RunFolder(folder), None)) for folder in (again, whole)]
        assert len(logs[1]) == 5 + 4
        assert logs[0] == logs[1], (method, grid)
        both = [
            load_file(*(folder / "model").glob("*model.safetensors")) for folder in (again, whole)
        ]
        assert both[0].keys() == both[1].keys()
        for name, weight in both[1].items():
            assert (both[0][name] == weight).all(), (method, grid, name)
