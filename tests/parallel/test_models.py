"""Model families divided among ranks equal those of one device."""

from pathlib import Path

import numpy as np
import pytest

from unsloth_cupy.errors import ConfigError
from unsloth_cupy.models import create, load
from unsloth_cupy.models.division import Division, check_divides
from unsloth_cupy.models.parse import parse
from unsloth_cupy.models.quantized import cut_by_ranks, quantizing
from unsloth_cupy.ops.quantized.weight import Quantized
from unsloth_cupy.parallel import SingleCommunicator

from ..models.peers import CONFIGS, SIZES
from .models import filled


@pytest.mark.parametrize("name", CONFIGS)
def test_parts_cover_all_once(name: str) -> None:
    """The slices of the ranks make up each parameter; what several hold is counted by shares."""
    comm = SingleCommunicator()
    config = parse(SIZES | CONFIGS[name])
    for comm.size in (2, 4):
        covered = {key: np.zeros(shape) for key, shape in config.shapes().items()}
        for rank in range(comm.size):
            comm.rank = rank
            division = Division(config, comm)
            for key, whole in covered.items():
                numbers = np.arange(whole.size).reshape(whole.shape)
                own = division.own(key, numbers)
                for rows, share in division.shares(key):
                    np.add.at(whole.reshape(-1), own[rows].reshape(-1), share)
        for key, whole in covered.items():
            np.testing.assert_allclose(whole, 1, err_msg=key)


def test_what_does_not_divide_is_refused(tmp_path: Path) -> None:
    llama = SIZES | {"model_type": "llama"}
    with pytest.raises(ConfigError, match=r"4 heads.* not a multiple of 3 .* among 1, 2, 4"):
        check_divides(parse(llama), 3)
    with pytest.raises(ConfigError, match="inner size of 3 is not enough for 4"):
        check_divides(parse(llama | {"intermediate_size": 3}), 4)
    with pytest.raises(ConfigError, match="vocabulary of 3 is not enough for 4"):
        check_divides(parse(llama | {"vocab_size": 3}), 4)
    online = {"quant_method": "bitnet", "linear_class": "autobitlinear"}
    online |= {"quantization_mode": "online"}
    with pytest.raises(ConfigError, match="rounded at every call are not divided"):
        check_divides(parse(llama | {"quantization_config": online}), 2)
    filled(llama, tmp_path / "model")
    model = load(tmp_path / "model", communicator=SingleCommunicator())
    with pytest.raises(ConfigError, match="DoRA"):
        model.add_adapter(2, dora=True)
    with pytest.raises(ConfigError, match="to_torch: the model is not whole"):
        model.to_torch()
    model.add_adapter(2, dropout=0.1)
    tokens = np.array([[3, 4]])
    with pytest.raises(ConfigError, match="dropout is not divided"):
        model.loss_and_gradients(tokens, tokens, seed=1)


def test_new_models_are_parts_of_one() -> None:
    """Equal seeds give equal parameters, however many ranks divide them."""
    comm, llama = SingleCommunicator(), SIZES | {"model_type": "llama"}
    comm.size = 2
    whole = create(llama, seed=3)
    for rank in range(2):
        comm.rank = rank
        model = create(llama, seed=3, communicator=comm)
        assert model.division is not None
        for name, array in model.parameters.items():
            np.testing.assert_array_equal(array, model.division.own(name, whole.parameters[name]))


@pytest.mark.parametrize("kind", ["nf4", "int8", "nf4-double"])
@pytest.mark.parametrize(
    ("sizes", "ranks"),
    [((128, 4, 192), 2), ((64, 2, 320), 4), ((128, 8, 172), 2), ((80, 2, 172), 2)],
)
def test_layers_whose_codes_differ_are_named(
    kind: str, sizes: tuple[int, int, int], ranks: int
) -> None:
    """What is not named has the values of the whole weight, bit for bit; what is named has not."""
    hidden, heads, inner = sizes
    config = SIZES | {"model_type": "llama", "hidden_size": hidden, "intermediate_size": inner}
    config |= {"num_attention_heads": heads * 2, "num_key_value_heads": heads, "head_dim": 32}
    config |= {"num_hidden_layers": 1}
    comm = SingleCommunicator()
    comm.size = ranks
    whole = create(config, seed=0)
    make, differ = quantizing("test", kind), set[str]()
    named = cut_by_ranks(Division(parse(config), comm), kind)
    for comm.rank in range(ranks):
        division = Division(parse(config), comm)
        for name, array in whole.parameters.items():
            made, part = make(name, array), make(name, division.own(name, array).copy())
            if isinstance(made, Quantized):
                wanted = division.own(name, made.dequantize())
                dense = part.dequantize() if isinstance(part, Quantized) else part
                if not np.array_equal(dense, wanted):
                    differ.add(name.split(".")[-2])
    assert named == sorted(differ)
