"""Models divided among ranks equal those of one device: loss, gradients, tokens, files."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from unsloth_cupy import CheckpointConfig
from unsloth_cupy.core.dtypes import BFLOAT16
from unsloth_cupy.models import create, load, quantize
from unsloth_cupy.models.ranks.division import Division
from unsloth_cupy.ops.quantized.weight import Quantized
from unsloth_cupy.parallel import Communicator

from ..conftest import FOLDER
from ..harness.sampling import Sample
from ..models.peers import CONFIGS, RELATIVES, SIZES
from . import held, pipelines
from .ranks import close, few, likelihoods

ROPES = ("llama llama3", "llama linear", "llama yarn", "llama dynamic", "phi3 longrope")
ONLINE = {  # whose layers are rounded at every call, as BitNet is trained
    "quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online",
}  # fmt: skip
ROUNDED = {"model_type": "bitnet", "quantization_config": ONLINE}
NEXT = ("olmo", "granite", "cohere", "glm", "hunyuan", "nemotron", "apertus", "phi")
LATENT = ("minicpm3", "minicpm3 plain", "youtu")
FAMILIES = {  # by ranks: 4 share 2 heads of keys and values, 3 have one each
    2: (*(name for name in CONFIGS if name not in ROPES), "bitnet online", *NEXT, *LATENT),
    3: ("olmo2",),
    4: ("llama biases", "phi3", "bitnet online"),
}


def filled(config: dict[str, Any], folder: Path) -> None:
    """Save a random model whose norms and biases are not ones and zeros."""
    model, rng = create(config, seed=0), np.random.default_rng(0)
    for name, array in model.parameters.items():
        if array.ndim == 1:
            model.parameters[name] = array + 0.3 * rng.standard_normal(array.shape, np.float32)
    model.save(folder)


def texts() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    tokens = rng.integers(3, SIZES["vocab_size"], (2, 11))
    labels = tokens.copy()
    labels[0, :3] = -100
    return tokens, labels


def gathered(division: Division, key: str, gradient: Any, expected: Any) -> None:
    """Compare a gradient with that of one process."""
    close(division.gathered(key, gradient), expected, few(expected))


def equal(folder: Path, comm: Communicator, name: str, **options: Any) -> None:
    """Compare a step and generated tokens with those of a model that one rank holds."""
    whole, model = load(folder, **options), load(folder, communicator=comm, **options)
    division = model.division
    assert isinstance(division, Division)
    tokens, labels = texts()
    expected, gradients = whole.loss_and_gradients(tokens, labels)
    close(model.loss(tokens, labels), expected)
    for checkpoint in (None, CheckpointConfig(recompute_every=2)):
        loss, actual = model.loss_and_gradients(tokens, labels, checkpoint=checkpoint)
        close(loss, expected)
        assert actual.keys() == gradients.keys()
        for key, gradient in actual.items():
            gathered(division, key, gradient, gradients[key])
    for one, other in zip(*(m.log_probs(tokens, labels) for m in (model, whole)), strict=True):
        close(one, other)
    likely = partial(likelihoods, tokens=tokens, labels=labels)
    (loss, actual), (expected, gradients) = (m.value_and_gradients(likely) for m in (model, whole))
    close(loss, expected)
    for key, gradient in actual.items():
        gathered(division, key, gradient, gradients[key])
    close(model.logits(tokens), whole.logits(tokens))
    made = model.generate(tokens, max_new_tokens=4, stop=())
    np.testing.assert_array_equal(made, whole.generate(tokens, max_new_tokens=4, stop=()), name)


def same_files(folder: Path, comm: Communicator, out: Path) -> None:
    """A model that ranks share is saved as one rank would save it."""
    load(folder, communicator=comm).save(out)
    before, after = load(folder), load(out)
    for name, array in before.parameters.items():
        np.testing.assert_array_equal(after.parameters[name], array, name)


def adapted(folder: Path, comm: Communicator, out: Path) -> None:
    """Adapters are divided, learn alike, and are saved whole."""
    rng = np.random.default_rng(2)
    if comm.rank == 0:
        whole = load(folder)
        whole.add_adapter(3, seed=1)
        assert whole.adapter is not None
        for array in whole.adapter.parameters.values():
            array[...] += 0.1 * rng.standard_normal(array.shape, np.float32)
        whole.save_adapter(out / "drawn")
    comm.barrier()
    equal(folder, comm, "lora", lora=out / "drawn")
    model = load(folder, communicator=comm, lora=out / "drawn")
    model.save_adapter(out / "again")
    read = (load(folder, lora=out / each).adapter.parameters for each in ("drawn", "again"))
    for one, other in zip(*(each.values() for each in read), strict=True):
        np.testing.assert_array_equal(one, other)


def quantized(folder: Path, comm: Communicator, out: Path) -> None:
    """Weights of each kind, made as they are read or read as codes, are those of one device."""
    for kind in Sample.one_in(2, ("nf4-double", "int8", "fp4", "ternary", "nf4")):
        if comm.rank == 0:
            load(folder, quantize=kind).save(out / kind)
        comm.barrier()
        for source, how in ((folder, {"quantize": kind}), (out / kind, {})):
            whole, model = load(source, **how), load(source, communicator=comm, **how)
            made = [n for n, weight in model.parameters.items() if isinstance(weight, Quantized)]
            assert len(made) == 14
            for name in made:
                expected = model.division.own(name, whole.parameters[name].dequantize())
                np.testing.assert_array_equal(model.parameters[name].dequantize(), expected, name)
            tokens, labels = texts()
            same_adapters(whole, model, tokens, labels)
    model, whole = load(folder, communicator=comm), load(folder)
    for each in (model, whole):
        quantize(each, kind)
    close(model.loss(tokens, labels), whole.loss(tokens, labels))


def same_adapters(whole: Any, model: Any, tokens: Any, labels: Any) -> None:
    """Adapters of ranks have the loss and the gradients of one device."""
    for each in (whole, model):
        each.add_adapter(2, seed=0)
    expected, gradients = whole.loss_and_gradients(tokens, labels)
    loss, actual = model.loss_and_gradients(tokens, labels)
    close(loss, expected)
    for key, gradient in actual.items():
        close(model.division.gathered(key, gradient), gradients[key])


def packed(comm: Communicator) -> None:
    """Rows of x that ranks divide are rounded by their largest size in all of them."""
    folder = FOLDER / "quant" / "bitnet"
    whole, model = load(folder, dtype="float64"), load(folder, dtype="float64", communicator=comm)
    tokens, labels = texts()
    close(model.logits(tokens), whole.logits(tokens))
    same_adapters(whole, model, tokens, labels)


def narrow(folder: Path, comm: Communicator) -> None:
    """Slices of 16 bits are those of the whole, and the loss is that of one device, rounded."""
    model, whole = load(folder, communicator=comm), load(folder)
    assert model.table.dtype == whole.table.dtype == BFLOAT16
    for name, own in model.parameters.items():
        np.testing.assert_array_equal(model.division.gathered(name, own), whole.parameters[name])
    close(model.loss(*texts()), whole.loss(*texts()), 2**-8)


def all_checks(comm: Communicator, folder: Path) -> None:
    for name in Sample.one_in(3, FAMILIES.get(comm.size, ())):
        here = folder / name.replace(" ", "-")
        config = (
            SIZES
            | (CONFIGS | RELATIVES).get(name, ROUNDED)
            | {"num_attention_heads": 4 if comm.size != 3 else 6}
        )
        config |= {"intermediate_size": 49}  # which no number of ranks divides
        if "one" not in name and name not in LATENT:  # whose heads all have keys
            config |= {"num_key_value_heads": 2 if comm.size != 3 else 3}
        config.setdefault("head_dim", 8)
        if comm.rank == 0:
            filled(config, here)
        comm.barrier()
        # what is rounded may fall to either side, but for numbers that differ as little as these
        equal(here, comm, name, dtype="float64" if name == "bitnet online" else None)
        same_files(here, comm, folder / f"{here.name}-saved")
        if name in ("llama biases", "phi3", "olmo2", *LATENT):
            adapted(here, comm, here)
        if comm.size % 2 == 0 and name in ("llama biases", "phi3", "gemma2", "olmo2 tied"):
            lora = here / "drawn" if name == "phi3" else None
            pipelines.models(comm, here, folder / f"{here.name}-staged", lora)
    pipelines.small_layers(comm)
    if comm.size % 2 == 0:
        packed(comm)
    if comm.rank == 0:
        sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2}
        sizes |= {"head_dim": 32}
        filled(SIZES | {"model_type": "llama"} | sizes, folder / "wide")
        model = load(folder / "wide", dtype="bfloat16")
        for name, array in model.parameters.items():
            if array.ndim == 1:
                model.parameters[name] = array.astype(np.float32)
        model.save(folder / "narrow")
    comm.barrier()
    if comm.size == 2:
        quantized(folder / "wide", comm, folder)
        narrow(folder / "narrow", comm)
        pipelines.narrow(folder / "narrow", comm)
        held.all_checks(comm)
