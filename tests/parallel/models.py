"""Models divided among ranks equal those of one device: loss, gradients, tokens, files."""

from pathlib import Path
from typing import Any

import numpy as np

from unsloth_cupy import CheckpointConfig, Nf4
from unsloth_cupy.core.dtypes import BFLOAT16
from unsloth_cupy.models import create, load
from unsloth_cupy.models.division import Division
from unsloth_cupy.parallel import Communicator

from ..models.peers import CONFIGS, SIZES
from ..sample import Sample
from . import held, pipelines
from .ranks import close

ROPES = ("llama llama3", "llama linear", "llama yarn", "llama dynamic", "phi3 longrope")
FAMILIES = {  # by ranks: 4 share 2 heads of keys and values, 3 have one each
    2: tuple(name for name in CONFIGS if name not in ROPES),
    3: ("olmo2",),
    4: ("llama biases", "phi3"),
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


def equal(folder: Path, comm: Communicator, name: str, **options: Any) -> None:
    """Compare a step and generated tokens with those of a model that one rank holds."""
    whole, model = load(folder, **options), load(folder, communicator=comm, **options)
    division = model.division
    assert isinstance(division, Division)
    tokens, labels = texts()
    wanted, gradients = whole.loss_and_gradients(tokens, labels)
    close(model.loss(tokens, labels), wanted)
    for checkpoint in (None, CheckpointConfig(checkpoint_every=2)):
        loss, found = model.loss_and_gradients(tokens, labels, checkpoint=checkpoint)
        close(loss, wanted)
        assert found.keys() == gradients.keys()
        for key, gradient in found.items():
            close(division.gathered(key, gradient), gradients[key])
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


def quantized(folder: Path, comm: Communicator) -> None:
    """Each rank quantizes what it reads; the loss is that of the weights that were made."""
    model = load(folder, communicator=comm, quantize="nf4")
    model.add_adapter(2, seed=0)
    whole, made = load(folder), 0
    for name, weight in model.parameters.items():
        if isinstance(weight, Nf4):
            made += 1
            whole.parameters[name] = model.division.gathered(name, weight.dequantize())
    assert made == 7
    tokens, labels = texts()
    loss, gradients = model.loss_and_gradients(tokens, labels)
    close(loss, whole.loss(tokens, labels))
    whole.add_adapter(2, seed=0)
    wanted = whole.loss_and_gradients(tokens, labels)[1]
    for key, gradient in gradients.items():
        close(model.division.gathered(key, gradient), wanted[key])


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
        config = SIZES | CONFIGS[name] | {"num_attention_heads": 4 if comm.size != 3 else 6}
        config |= {"intermediate_size": 49}  # which no number of ranks divides
        config |= {"num_key_value_heads": 2 if comm.size != 3 else 3} if "one" not in name else {}
        config.setdefault("head_dim", 8)
        if comm.rank == 0:
            filled(config, here)
        comm.barrier()
        equal(here, comm, name)
        same_files(here, comm, folder / f"{here.name}-saved")
        if name in ("llama biases", "phi3", "olmo2"):
            adapted(here, comm, here)
        if comm.size % 2 == 0 and name in ("llama biases", "phi3", "gemma2", "olmo2 tied"):
            lora = here / "drawn" if name == "phi3" else None
            pipelines.models(comm, here, folder / f"{here.name}-staged", lora)
    pipelines.small_layers(comm)
    if comm.rank == 0:
        sizes = {"hidden_size": 64, "intermediate_size": 193, "num_hidden_layers": 1}
        filled(SIZES | {"model_type": "llama"} | sizes, folder / "wide")
        model = load(folder / "wide", dtype="bfloat16")
        model.save(folder / "narrow")
    comm.barrier()
    if comm.size == 2:
        quantized(folder / "wide", comm)
        narrow(folder / "narrow", comm)
        held.all_checks(comm)
