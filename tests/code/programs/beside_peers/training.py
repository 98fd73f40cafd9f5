"""Whole steps of training, and generation: a contestant in a process of its own.

Each contestant builds the same random weights from a seed, reads the same tokens, and steps AdamW
at the same rate.  Its losses, and the norm of its first gradient, are compared with those of the
contestants before it; one that differs is named, and has no time.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from .cases import OURS, Case, config_of
from .machine import CardMemory, Machine

WARM, TIMED = 3, 5  # steps; the first compiles
RATE, ALPHA = 1e-4, 32  # as in the published comparisons
LOSSES = 2e-2  # of a loss: 16-bit results in another order, three steps long
NORMS = {False: 2e-2, True: 0.1}  # of the gradient; adapters differ in their random matrix
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
Say = Callable[..., None]


class Trained(NamedTuple):
    """A contestant: gradients of a batch that are added up, and the step that applies them."""

    gradients: Callable[[Any], Any]  # a batch -> its loss
    norm: Callable[[], float]
    step: Callable[[], None]


def random_model(case: Case, machine: Machine) -> Any:
    """Return a model of transformers with the random weights of the case."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**config_of(case.sizes["model"], machine.on_gpu))
    torch.manual_seed(0)
    with torch.device(machine.device):
        return AutoModelForCausalLM.from_config(
            config, dtype=machine.dtype, attn_implementation="sdpa"
        )


def batches(case: Case, machine: Machine) -> list[list[Any]]:
    """Return the tokens of each micro-batch of each step: the same in all steps but new lengths."""
    sizes = case.sizes
    vocab = config_of(sizes["model"], machine.on_gpu)["vocab_size"]
    result = []
    for number in range(WARM + TIMED):
        rng = np.random.default_rng(1)
        shorter = 37 * number % (sizes["tokens"] // 4) if sizes.get("lengths") else 0
        shape = sizes["rows"], sizes["tokens"] - shorter
        count = sizes.get("micro_batches", 1)
        result.append([rng.integers(0, vocab, shape) for _ in range(count)])
    return result


def offsets_of(case: Case) -> Any:
    """Return the offsets of the documents of a row, or None."""
    documents = case.sizes.get("documents")
    return documents and np.linspace(0, case.sizes["tokens"], documents + 1).astype(int)


def ours(case: Case, machine: Machine, *, graph: bool) -> Trained:
    """Return the steps of this library."""
    from unsloth_cupy import AdamW, accumulate_, models

    if machine.on_gpu:
        import cupy as xp
    else:
        xp = np
    model = models.from_torch(random_model(case, machine))
    if kind := case.sizes.get("quantized"):
        models.quantize(model, kind)
        torch.cuda.empty_cache()  # torch allocated the dense weights
    if rank := case.sizes.get("rank"):
        model.add_adapter(rank, alpha=ALPHA)
    optimizer, sums = AdamW(model.trainable, lr=RATE, weight_decay=0.0), dict[str, Any]()
    count = case.sizes.get("micro_batches", 1)
    offsets = offsets_of(case)
    packed = {} if offsets is None else {"offsets": xp.asarray(offsets)}

    def gradients(batch: Any) -> Any:
        tokens = xp.asarray(batch)
        loss, parts = model.loss_and_gradients(
            tokens, tokens, graph=graph and machine.on_gpu, **packed
        )
        if count == 1:
            sums.update(parts)
        elif sums:
            for name, part in parts.items():
                accumulate_(sums[name], part)
        else:
            sums.update({name: part.astype(np.float32) for name, part in parts.items()})
        return loss.copy() if machine.on_gpu else loss  # a graph overwrites its loss

    def norm() -> float:
        squares = (float(xp.square(part.astype(np.float32)).sum()) for part in sums.values())
        return float(np.sqrt(sum(squares))) / count

    def step() -> None:
        optimizer.step(sums, factor=1 / count)
        sums.clear()

    return Trained(gradients, norm, step)


def theirs(case: Case, machine: Machine, *, liger: bool, compiled: bool) -> Trained:
    """Return the steps of transformers, with peft and bitsandbytes where the case requires them."""
    if liger:
        from liger_kernel.transformers.monkey_patch import _apply_liger_kernel

        _apply_liger_kernel(config_of(case.sizes["model"], machine.on_gpu)["model_type"])
    model = random_model(case, machine)
    if case.sizes.get("quantized"):
        in_four_bits(model, machine)
    if rank := case.sizes.get("rank"):
        from peft import LoraConfig, get_peft_model

        adapter = LoraConfig(r=rank, lora_alpha=ALPHA, target_modules=TARGETS)
        model = get_peft_model(model, adapter, autocast_adapter_dtype=False)
    model.train()
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    options = {"fused": True} if machine.on_gpu else {}
    optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.0, **options)
    run = torch.compile(model) if compiled else model
    offsets, count = offsets_of(case), case.sizes.get("micro_batches", 1)
    positions = None
    if offsets is not None:
        lengths = np.diff(offsets)
        positions = torch.cat([torch.arange(n) for n in lengths])[None].to(machine.device)

    def gradients(batch: Any) -> Any:
        tokens = torch.from_numpy(batch).to(machine.device)
        labels = tokens if positions is None else tokens.masked_fill(positions == 0, -100)
        outputs = run(input_ids=tokens, labels=labels, position_ids=positions, use_cache=False)
        (outputs.loss / count).backward()
        return outputs.loss.detach()

    def norm() -> float:
        gradients = [weight.grad.float() for weight in trained if weight.grad is not None]
        return float(torch.stack([each.square().sum() for each in gradients]).sum().sqrt())

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Trained(gradients, norm, step)


def in_four_bits(model: Any, machine: Machine) -> None:
    """Replace the linear layers of a model but its head by NF4 layers of bitsandbytes."""
    import bitsandbytes as bnb

    for module in [*model.modules()]:
        for name, layer in [*module.named_children()]:
            if type(layer) is not torch.nn.Linear or name == "lm_head":
                continue
            new = bnb.nn.Linear4bit(
                layer.in_features, layer.out_features, layer.bias is not None,
                compute_dtype=machine.dtype, quant_type="nf4", device="meta",
            )  # fmt: skip
            new.weight = bnb.nn.Params4bit(
                layer.weight.data, requires_grad=False, quant_type="nf4", module=new
            )
            new.bias = layer.bias
            setattr(module, name, new.to(machine.device))
    model.is_loaded_in_4bit = True  # peft asks for it
    torch.cuda.empty_cache()


def trained(case: Case, contestant: str, machine: Machine) -> Trained:
    """Return a contestant of a training case."""
    if contestant.startswith(OURS):
        return ours(case, machine, graph="no graph" not in contestant)
    words = contestant.split(", ")
    return theirs(case, machine, liger="liger" in words, compiled="compiled" in words)


def train(
    case: Case, contestant: str, machine: Machine, others: Sequence[dict[str, Any]], say: Say
) -> None:
    """Time the steps of a contestant, if its losses are those of the others."""
    memory, data = CardMemory(machine), batches(case, machine)
    run = trained(case, contestant, machine)
    memory.begin()
    losses: list[float] = []
    seconds: list[float] = []
    hosts: list[float] = []
    norm = 0.0
    for number, micro_batches in enumerate(data):
        machine.wait()
        start = time.perf_counter()
        loss = [run.gradients(batch) for batch in micro_batches]
        if number == 0:
            norm = run.norm()
        run.step()
        hosts.append(time.perf_counter() - start)
        machine.wait()
        seconds.append(time.perf_counter() - start)
        losses.append(float(sum(map(float, loss))) / len(loss))
        problem = difference(losses, norm, others, lora="rank" in case.sizes)
        if problem and number < WARM:
            return say(note=f"differs: {problem}", losses=losses, norm=norm)
    tokens = [sum(batch.size for batch in micro_batches) for micro_batches in data]
    rates = [count / time for count, time in zip(tokens, seconds, strict=True)]
    middle = {
        name: float(np.median(values[WARM:]))
        for name, values in {"seconds": seconds, "host": hosts, "tokens_per_second": rates}.items()
    }
    say(
        **middle, first=seconds[0], losses=losses[:WARM], norm=norm, bytes=memory.bytes(),
    )  # fmt: skip
    return None


def difference(
    losses: Sequence[float], norm: float, others: Sequence[dict[str, Any]], *, lora: bool
) -> str:
    """Return what differs from the first of the other contestants, or "" if nothing does."""
    if not np.isfinite([*losses, norm]).all():
        return f"losses {losses}, norm {norm}"
    first = next((line for line in others if "losses" in line and "seconds" in line), None)
    if first is None:
        return ""
    pairs = [*zip(losses, first["losses"], strict=False)]
    away = max(abs(a / b - 1) for a, b in pairs)
    if away > LOSSES:
        return f"a loss is {away:.1%} from that of {first['contestant']}"
    away = abs(norm / first["norm"] - 1)
    if away > NORMS[lora]:
        return f"the norm of the gradient is {away:.1%} from that of {first['contestant']}"
    return ""


def generate(
    case: Case, contestant: str, machine: Machine, others: Sequence[dict[str, Any]], say: Say
) -> None:
    """Time a new token of greedy generation, if the first new tokens are those of the others."""
    sizes, memory = case.sizes, CardMemory(machine)
    model: Any = random_model(case, machine).eval()
    vocab = config_of(sizes["model"], machine.on_gpu)["vocab_size"]
    shape = sizes["batch"], sizes["prompt"]
    prompt = np.random.default_rng(1).integers(0, vocab, shape)
    if contestant == OURS:
        from unsloth_cupy import models

        model, tokens = (
            models.from_torch(model),
            machine.ours(torch.from_numpy(prompt).to(machine.device)),
        )

        def run(count: int) -> Any:
            return model.generate(tokens, max_new_tokens=count, stop=())
    else:
        tokens = torch.from_numpy(prompt).to(machine.device)
        static = "static cache" in contestant and machine.on_gpu  # compiles the step
        options: dict[str, Any] = {"cache_implementation": "static"} if static else {}

        def run(count: int) -> Any:
            return model.generate(
                tokens, max_new_tokens=count, min_new_tokens=count, do_sample=False, **options
            )

    memory.begin()
    seconds, new = {}, sizes["new"]
    result = machine.tensor(run(new)).cpu()  # compiles
    first = result[:, sizes["prompt"]].tolist()
    reference = next((line["tokens"] for line in others if "tokens" in line), first)
    if sum(a != b for a, b in zip(first, reference, strict=True)) > len(first) // 8:
        return say(note="differs: the first new tokens", tokens=first)  # 1 of 8 may be a tie
    for count in (1, new):
        machine.wait()
        start = time.perf_counter()
        run(count)
        machine.wait()
        seconds[count] = time.perf_counter() - start
    each = (seconds[new] - seconds[1]) / (new - 1)
    say(
        seconds=each, prompt_seconds=seconds[1], tokens_per_second=sizes["batch"] / each,
        tokens=first, bytes=memory.bytes(),
    )  # fmt: skip
    return None
