"""Measure on this machine the numbers that docs/pictures.py draws: writes docs/pictures/NAME.json.

    python docs/measure.py beside-transformers      memory and time of a training step of a Llama
    python docs/measure.py trace                    a profiled step
    python docs/measure.py loss                     a run of finetune
    python docs/measure.py serving THREADS          tokens a second of 32 prompts at once
    python docs/measure.py merges FOLDER [LR [KIND,KIND [TOKENS]]]      losses of merged files

The first and ``serving`` need the extra ``peers``.  docs/performance.md has the command that writes
cpu.json.
"""

import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
FOLDER = Path(__file__).with_name("pictures")

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 16384,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
SERVED = CONFIG | {
    "vocab_size": 8192,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_key_value_heads": 4,
}
SERVERS = (
    "unsloth_cupy, Engine",
    "transformers, continuous batching, pages of 256",
    "transformers, continuous batching, pages of 32",
    "transformers, padded generate",
)
TOKENS = (512, 1024, 2048, 4096)
SIDES = ("unsloth_cupy", "transformers", "transformers, eager")
MERGED = "nf4,int8,ternary,q4_0,q8_0,q4_k_m"


def facts(method: str) -> dict[str, Any]:
    """Return the facts that belong to a measurement: machine, date, versions and method."""
    from unsloth_cupy import machine

    return {
        "machine": f"{machine.cores()} cores, {machine.processor()}, {machine.blas()}",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {name: machine.version(name) for name in ("numpy", "torch", "transformers")},
        "method": method,
    }


def high_water() -> int:
    """Return the peak of this process's resident memory since the last reset, in bytes."""
    match = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) << 10


def step_of(side: str) -> Any:
    """Return a function that takes tokens and computes the loss and all gradients."""
    import numpy as np

    from unsloth_cupy import models

    ours = models.create(CONFIG, seed=0)
    if side == "unsloth_cupy":
        return lambda tokens: ours.loss_and_gradients(tokens, tokens)[0]
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    attention = "eager" if side.endswith("eager") else "sdpa"
    theirs = LlamaForCausalLM(LlamaConfig(**CONFIG, attn_implementation=attention))
    state = {name: torch.from_numpy(np.array(array)) for name, array in ours.parameters.items()}
    theirs.load_state_dict(state, strict=False)

    def step(tokens: Any) -> float:
        theirs.zero_grad(set_to_none=True)
        ids = torch.from_numpy(tokens)
        loss = theirs(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return float(loss)

    return step


def one(side: str, tokens: int) -> dict[str, Any]:
    """Return the memory and the time of a step, measured in this process."""
    import numpy as np

    step = step_of(side)
    step(np.zeros((1, 64), np.int64))  # allocates what later steps reuse
    rows = np.random.default_rng(0).integers(0, CONFIG["vocab_size"], (1, tokens))
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before, loss, seconds = high_water(), 0.0, []
    for _ in range(3):
        start = time.perf_counter()
        loss = float(step(rows))
        seconds.append(time.perf_counter() - start)
    peak = high_water() - before
    return {"side": side, "tokens": tokens, "bytes": peak, "seconds": min(seconds), "loss": loss}


def beside() -> dict[str, Any]:
    """Return the measurements of all sides, each taken in a separate process."""
    rows = []
    for tokens in TOKENS:
        for side in SIDES:
            command = [sys.executable, __file__, "one", side, str(tokens)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            rows.append(json.loads(done.stdout.splitlines()[-1]))
            print(rows[-1])
    method = (
        "peak memory of a process in a step (VmHWM of Linux, reset before the step), minus its"
        " memory before the step; loss and gradients of all weights, one row, float32; maximum of"
        " three steps, each library in a separate process"
    )
    return facts(method) | {"config": CONFIG, "rows": rows}


def answers_of(side: str, threads: int) -> Any:
    """Return a function that answers 32 prompts, and the numbers of new tokens."""
    import numpy as np

    from unsloth_cupy import Engine, models

    rng, ours = np.random.default_rng(0), models.create(SERVED, seed=0)
    prompts = [rng.integers(3, SERVED["vocab_size"], n).tolist() for n in rng.integers(8, 65, 32)]
    news = rng.permutation(np.geomspace(10, 200, 32).round().astype(int)).tolist()

    def of_engine() -> list[list[int]]:
        with Engine(ours, rows=32, pages=320) as engine:
            for prompt, new in zip(prompts, news, strict=True):
                engine.submit(prompt, max_new_tokens=new, stop=())
            return [request.samples[0].tokens for request in engine.run()]

    if side == "unsloth_cupy, Engine":
        return of_engine, news
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    torch.set_num_threads(threads)
    theirs = LlamaForCausalLM(LlamaConfig(**SERVED, attn_implementation="sdpa")).eval()
    state = {name: torch.from_numpy(np.array(array)) for name, array in ours.parameters.items()}
    theirs.load_state_dict(state, strict=False)
    greedy: Any = {"do_sample": False, "eos_token_id": -1, "pad_token_id": 0}

    def padded() -> list[list[int]]:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in prompts])
        real = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts])
        config = GenerationConfig(**greedy, max_new_tokens=max(news))
        outputs = theirs.generate(ids, attention_mask=real, generation_config=config)
        return [row[width : width + new] for row, new in zip(outputs.tolist(), news, strict=True)]

    def continuous() -> list[list[int]]:
        page = int(side.rpartition(" ")[2])
        more = ContinuousBatchingConfig(
            page_size=page, num_blocks=32 * -(-264 // page), max_batch_tokens=512
        )
        config = GenerationConfig(**greedy, max_new_tokens=max(news))
        both: Any = {"generation_config": config, "continuous_batching_config": more}
        with theirs.continuous_batching_context_manager(**both) as manager:
            pairs = zip(prompts, news, strict=True)
            names = [manager.add_request(row, max_new_tokens=new) for row, new in pairs]
            ended: dict[str, list[int]] = {}
            while len(ended) < len(names):
                result = manager.get_result(timeout=100)
                if result.is_finished():
                    ended[result.request_id] = result.generated_tokens
        return [ended[name] for name in names]

    return padded if side.endswith("generate") else continuous, news


def one_served(side: str, threads: int) -> dict[str, Any]:
    """Return the tokens a second of the fastest of three calls, measured in this process."""
    run, news = answers_of(side, threads)
    answers = run()
    assert [*map(len, answers)] == news
    clocks = {"second": time.perf_counter, "second of processors": time.process_time}
    seconds: dict[str, list[float]] = {name: [] for name in clocks}
    for _ in range(3):
        starts = {name: clock() for name, clock in clocks.items()}
        run()
        for name, clock in clocks.items():
            seconds[name].append(clock() - starts[name])
    speeds = {f"tokens a {name}": round(sum(news) / min(each), 1) for name, each in seconds.items()}
    return {"side": side, "new tokens": sum(news), **speeds, "answers": answers}


def serving(threads: str) -> Iterator[str]:
    """Yield the speed of each side, and how many of its answers are those of the first side."""
    names = "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"
    first: list[list[int]] | None = None
    for side in SERVERS:
        command = [sys.executable, __file__, "one-served", side, threads]
        environment = os.environ | dict.fromkeys(names, threads)
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        row = json.loads(done.stdout.splitlines()[-1])
        answers = row.pop("answers")
        first = answers if first is None else first
        equal = sum(one == other for one, other in zip(answers, first, strict=True))
        yield f"{row}, {equal} of {len(answers)} answers equal"


def trace() -> dict[str, Any]:
    """Return the trace of a step of training, as ``save_trace`` writes it."""
    import numpy as np

    from unsloth_cupy import AdamW, models, profile

    model = models.create(CONFIG | {"num_hidden_layers": 2, "vocab_size": 2048}, seed=0)
    optimizer = AdamW(model.parameters)
    tokens = np.random.default_rng(0).integers(0, 2048, (2, 256))
    for _ in range(3):
        with profile(parameters=model.parameters) as profiled:
            _, gradients = model.loss_and_gradients(tokens, tokens)
            optimizer.step(gradients)
    with tempfile.TemporaryDirectory() as folder:
        profiled.save_trace(Path(folder) / "step.json")
        saved = json.loads((Path(folder) / "step.json").read_text())
    kept = ("name", "cat", "ts", "dur")
    events = [{name: event[name] for name in kept} for event in saved["traceEvents"]]
    method = "profile of the third step of training, 2 rows of 256 tokens, float32"
    return facts(method) | {"traceEvents": events}


def loss() -> dict[str, Any]:
    """Return the losses of a run of ``finetune``."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "unsloth_cupy", "finetune"]
        subprocess.run([*command, "--steps", "300", "--out", folder], check=True)
        log = (Path(folder) / "log.jsonl").read_text().splitlines()
    return curve(map(json.loads, log))


def curve(lines: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the values of a run's log that the picture shows."""
    kept = ("step", "loss", "held_out_loss", "unigram_baseline")
    points = [{k: round(v, 4) for k, v in line.items() if k in kept} for line in lines]
    return facts("log of unsloth-cupy finetune --steps 300") | {"lines": points}


def merges(
    base: str, lr: str = "1e-3", kinds: str = MERGED, tokens: str | None = None
) -> Iterator[str]:
    """Yield the rows of a table: what a file of each kind loses, merged after training or through.

    ``base`` is the folder of a model, whose adapters of rank 16 learn Python's documentation for
    200 steps beside nf4 weights, in rows of so many ``tokens``.
    """
    from unsloth_cupy import models
    from unsloth_cupy.finetune import Settings, Trainer
    from unsloth_cupy.models.adapters.into import IN_FOLDERS
    from unsloth_cupy.models.quantizer import Quantizer

    with tempfile.TemporaryDirectory() as place:

        def run(name: str, **settings: Any) -> Any:
            options = {"lora": 16, "quantize": "nf4", "steps": 200, "evaluate_every": 200}
            options |= {"tokens": None if tokens is None else int(tokens)}
            options |= {"lr": float(lr), "seed": 1, "out": Path(place, name)} | settings
            return Trainer(base, None, Settings(**options), quiet=True).train()

        def reported(run: Any) -> float:
            losses = [line.get("held_out_loss") for line in run.files.lines()]
            return next(float(loss) for loss in reversed(losses) if loss is not None)

        def held_out(model: Any) -> float:
            total = count = 0.0
            for batch in plain.loop.training_data.held_out:
                loss = float(model.loss(batch.tokens, batch.labels, offsets=batch.offsets))
                total, count = total + loss * batch.label_count, count + batch.label_count
            return total / count

        def after(kind: str, quantize: str | None) -> Any:
            model = models.load(plain.files.model, dtype="float32", quantize=quantize)
            if kind not in IN_FOLDERS:
                return exported(model, kind, f"{kind}-{quantize}")
            model.merge_adapter()
            make = Quantizer("merges", kind)
            model.parameters |= {name: make(name, w) for name, w in model.parameters.items()}
            return model

        def error(file: Any) -> float:
            difference = whole = 0.0
            for name in filter(sums.adapter.adds_to, sums.parameters):
                exact = sums.adapter.merge(name, sums.parameters[name])
                given = file.parameters[name]
                dense = given.dequantize("float32") if hasattr(given, "dequantize") else given
                difference += float(((dense - exact) ** 2).sum(dtype="f8"))
                whole += float((exact**2).sum(dtype="f8"))
            return float((difference / whole) ** 0.5)

        def exported(model: Any, kind: str, name: str) -> Any:
            path = Path(place, f"{name}.gguf")
            models.export_gguf(model, path, kind=kind, tokenizer=base)
            return models.load(path, dtype="float32")

        plain = run("plain")
        begun = plain.files.lines()[0]["held_out_loss"]
        sums = models.load(plain.files.model, dtype="float32", quantize="nf4")
        yield f"{begun:.4f} before the run, {reported(plain):.4f} after it"
        for kind in kinds.split(","):
            through = run(kind, merge_into=kind)
            if kind in IN_FOLDERS:
                models.merge(through.files.model, Path(place, f"merged-{kind}"))
                file = models.load(Path(place, f"merged-{kind}"), dtype="float32")
            else:
                file = exported(through.files.model, kind, kind)
            late, dense = after(kind, "nf4"), after(kind, None)
            losses = held_out(late), held_out(dense), reported(through), held_out(file)
            cells = kind, f"{error(late):.2%}", *(f"{loss:.4f}" for loss in losses)
            yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    if sys.argv[1:2] == ["merges"]:
        print(facts("Trainer")["machine"])
        for row in merges(*sys.argv[2:]):
            print(row, flush=True)
    elif sys.argv[1:2] == ["serving"]:
        print(facts("Engine"))
        for row in serving(sys.argv[2]):
            print(row, flush=True)
    elif sys.argv[1:2] == ["one-served"]:
        print(json.dumps(one_served(sys.argv[2], int(sys.argv[3]))))
    elif sys.argv[1:2] == ["one"]:
        print(json.dumps(one(sys.argv[2], int(sys.argv[3]))))
    elif sys.argv[1:] in (["beside-transformers"], ["trace"], ["loss"]):
        result = {"beside-transformers": beside, "trace": trace, "loss": loss}[sys.argv[1]]()
        (FOLDER / f"{sys.argv[1]}.json").write_text(json.dumps(result, indent=1) + "\n")
    else:
        sys.exit(__doc__)
