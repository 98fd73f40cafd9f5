"""What a Llama layer starts on a GPU: kernels, products of cuBLAS and functions of CuPy."""

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from unsloth_cupy import AdamW, LossScaler, measure_gradients
from unsloth_cupy.models import create, quantize
from unsloth_cupy.models.generation.decoding import Decoding
from unsloth_cupy.models.objective import TrainingStep
from unsloth_cupy.models.transformer import Transformer
from unsloth_cupy.ops.attention import _hopper
from unsloth_cupy.parallel import NcclCommunicator
from unsloth_cupy.serving.work import Work
from unsloth_cupy.training.tape import Tape

from ..machines.stand_in import Array, Machine, gpu

SIZES = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
ROWS, TOKENS = 2, 64
CALLS = 3  # the third call is replayed


def forward(machine: Machine, model: Transformer) -> Callable[[], Any]:
    tokens = machine.place(np.zeros((ROWS, TOKENS), np.int64))
    return lambda: model.logits(tokens)


def backward(machine: Machine, model: Transformer) -> Callable[[], Any]:
    """The gradients of a forward pass that is not counted."""
    tokens = machine.place(np.zeros((ROWS, TOKENS), np.int64))

    def run() -> None:
        tape = Tape()
        watched = {name: tape.watch(array) for name, array in model.trainable.items()}
        logits = model.on_tape({**model.parameters, **watched}, TrainingStep()).logits(tokens)
        seed = machine.array(logits.shape, logits.dtype)
        forget(machine)
        tape.gradients(logits, [*watched.values()], seed)

    return run


def adapted(machine: Machine, model: Transformer) -> Callable[[], Any]:
    """A step of training an adapter."""
    model.add_adapter(16)
    tokens = machine.place(np.zeros((ROWS, TOKENS), np.int64))
    return lambda: model.loss_and_gradients(tokens, tokens)


def decode(machine: Machine, model: Transformer) -> Callable[[], Any]:
    """A step of rows with one new token each."""
    decoding = Decoding(model, rows=ROWS, pages=4, page=TOKENS)
    sequences = [decoding.cache.begin([]) for _ in range(ROWS)]
    decoding.cache.extend(sequences, [TOKENS] * ROWS)
    work = [Work(s, np.zeros(1, np.int64), TOKENS + 1, n, "") for n, s in enumerate(sequences)]

    def run() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(decoding, "graphs", {})  # each call launches kernel by kernel
            decoding(work)

    return run


def adapted_decode(machine: Machine, model: Transformer) -> Callable[[], Any]:
    model.add_adapter(16)
    return decode(machine, model)


def records(machine: Machine) -> list[list[Any]]:
    return [machine.launches, machine.products, machine.functions]


def forget(machine: Machine) -> None:
    for record in records(machine):
        record.clear()


def of_a_layer(what: Any, capability: str) -> Counter[str]:
    """Return what the third layer of a model starts."""
    by_layers = []
    for layers in (2, 3):
        with gpu(capability, devices=1) as machine:
            machine.strict = False
            config = SIZES | {"num_hidden_layers": layers}
            run = what(machine, create(config, seed=0, dtype="bfloat16", device="cuda"))
            for _ in range(CALLS):
                forget(machine)
                run()
            every = [one for record in records(machine) for one in record]
            by_layers.append(Counter(getattr(one, "kernel", one) for one in every))
    return by_layers[1] - by_layers[0]


def packed(kind: str, what: Any) -> Any:
    """Return what a model of quantized weights starts."""

    def run(machine: Machine, model: Transformer) -> Callable[[], Any]:
        quantize(model, kind)
        started: Callable[[], Any] = what(machine, model)
        return started

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("nf4", (13, 9, 57, 17)),
        ("int8", (13, 9, 57, 17)),
        ("nf4-double", (19, 12, 68, 20)),  # each weight has an offset of its own
    ],
)
def test_launches_of_a_layer_of_quantized_weights(
    kind: str, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A joined weight is dequantized once; few rows need no dense weight."""
    monkeypatch.setattr(_hopper, "requested", True)
    every = (forward, decode, adapted, adapted_decode)
    assert tuple(of_a_layer(packed(kind, what), "90").total() for what in every) == expected


@pytest.mark.parametrize("capability", ["80", "90"])
@pytest.mark.parametrize(
    ("what", "expected"),
    [
        (forward, 9),
        (backward, 18),
        (decode, 9),
        (adapted, 49),
        (adapted_decode, 17),
    ],
)
def test_launches_of_a_llama_layer(
    what: Any, expected: int, capability: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention reads v where the product wrote it, though its tokens are further apart."""
    monkeypatch.setattr(_hopper, "requested", True)
    actual = of_a_layer(what, capability)
    assert actual.total() == expected, f"{what.__name__} starts {dict(actual)}"


def test_a_step_of_an_adapter_is_a_graph_and_three_launches() -> None:
    """Numbers of the host, such as the rate, stay outside: they are in these three."""
    with gpu("90", devices=1) as machine:
        machine.strict = False
        config = SIZES | {"num_hidden_layers": 2}
        model = create(config, seed=0, dtype="bfloat16", device="cuda")
        model.add_adapter(16)
        optimizer, scaler = AdamW(model.trainable), LossScaler()
        tokens = machine.place(np.zeros((ROWS, TOKENS), np.int64))
        for _ in range(CALLS + 1):
            forget(machine)
            _, gradients = model.loss_and_gradients(tokens, tokens, scaler=scaler, graph=True)
            measure = measure_gradients(gradients, 1.0, scaler=scaler)
            optimizer.step(gradients, lr=1e-3, finite=measure.finite, factor=measure.factor)
            scaler.update(measure.finite)
        assert [each.captured.graph.launched for each in model.graphs.by_form.values()] == [2]
        kernels = [launch.kernel for launch in machine.launches]
        assert kernels == ["measure", "adamw_step", "loss_scaler"]
        assert not machine.products
        assert not machine.functions


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("ranks", "tokens", "expected"), [(2, 1, 3), (8, 8, 3), (8, 64, 5)])
def test_launches_of_a_sum_over_ranks(
    ranks: int, tokens: int, expected: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a small array, as in a decode step: messages, the own one, and the sum of all."""
    started: list[str] = []
    nccl = SimpleNamespace(NCCL_UINT8=1, NcclError=OSError, groupStart=list)
    nccl.groupEnd = lambda: started.append("messages")
    sent = SimpleNamespace(send=lambda *_: None, recv=lambda *_: None)
    setitem = Array.__setitem__

    def counted(array: Array, *args: Any) -> None:
        started.append("setitem")
        setitem(array, *args)

    with gpu("90", devices=1) as machine:
        comm = object.__new__(NcclCommunicator)
        comm.rank, comm.size, comm.checked, comm.host = 1, ranks, False, None
        comm._nccl, comm._comm = nccl, sent
        comm._watchdog = SimpleNamespace(watch=lambda call: None)  # type: ignore[assignment]
        x = machine.array((1, tokens, 4096), dtype)
        monkeypatch.setattr(Array, "__setitem__", counted)
        assert comm.all_reduce(x).shape == x.shape
    started += [each.kernel for each in machine.launches] + machine.functions
    assert len(started) == expected, started
    assert started[-1] == "column_sum"
