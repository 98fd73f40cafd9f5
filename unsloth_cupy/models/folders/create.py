"""Models with random parameters: ``create``."""

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...core.call import check_options
from ...core.dtypes import FLOAT32, Array, float_dtype
from ...errors import ConfigError
from ...machine import check_bytes, on_device
from ...parallel.communicator import Communicator, check_communicator
from ..configs.config import SCALAR, Config
from ..configs.names import is_norm
from ..configs.text_configs import text_config
from ..parse import parse
from ..transformer import Transformer
from .rank_part import RankPart, division_of

XIELU = {"alpha_p": math.log(math.expm1(0.8)), "alpha_n": math.log(math.expm1(0.3))}
XIELU |= {"beta": 0.5, "eps": -1e-6}
DECAYS = (0.01, 16.0)  # range of exp(A_log), as in transformers
ONES = (
    *("linear_attn.norm.weight", "o_norm.weight", "dt_bias", ".D", SCALAR, "router.scale"),
    *("per_expert_scale", "layernorm_1.weight", "layernorm_2.weight"),
)


@check_options
def create(
    config: Mapping[str, Any],
    *,
    seed: int,
    dtype: Any = "float32",
    device: str | None = None,
    communicator: Communicator | None = None,
    pipeline: Communicator | None = None,
    chunks: int = 1,
    parts: Communicator | None = None,
    experts: Communicator | None = None,
    invariant: bool = False,
) -> Transformer:
    """Return a model with random parameters.

    Matrices are drawn from a normal distribution with a standard deviation of the config's
    ``initializer_range``; norm weights are 1, biases 0.

    Parameters
    ----------
    config : dict
        As in a Hugging Face config.json; ``model_type`` names the family.
    seed : int
        Equal seeds give equal parameters.
    dtype, device, communicator, pipeline, chunks, parts, experts, invariant
        As in ``load``.

    Returns
    -------
    model : Transformer

    Raises
    ------
    ConfigError
        The config or an option is invalid.
    DeviceError
        The device does not exist.
    """
    parsed, kind = parse(config), float_dtype("create", dtype)
    if type(seed) is not int or seed < 0:
        raise ConfigError(f"create: seed={seed!r} must be an integer of 0 or more")
    size = sum(map(math.prod, parsed.shapes().values())) * kind.itemsize
    division = division_of("create", parsed, kind, communicator, pipeline, chunks, experts)
    if parts is not None:
        check_communicator("create(parts=)", parts)
    for ranks in (communicator, parts):
        size //= 1 if ranks is None else ranks.size
    with on_device("create", device) as place:
        check_bytes("create: the parameters of this config: it", size, place(np.empty(0)))
        part = RankPart(parsed, place, division, parts)
        parameters = {
            name: part.draw(name, drawn(parsed, name, parsed.dtype_of(name, kind), [seed, index]))
            for index, name in enumerate(parsed.shapes())
            if part.holds(name)
        }
        texts = {"config.json": dict(text_config(config))}
        model = Transformer(division.config if division else parsed, parameters, texts)
        model.division, model.parts = division, part.parts
        return model.in_order(invariant)


def drawn(config: Config, name: str, kind: Any, seed: list[int]) -> Array:
    """Return a new parameter: norms start as the identity, biases as 0, matrices are random."""
    shape = config.shapes()[name]
    if name.endswith("A_log"):
        return np.log(np.random.default_rng(seed).uniform(*DECAYS, shape)).astype(kind)
    if name.endswith(ONES) or re.search(r"layernorm\.norms\.\d+\.weight$", name):
        return np.ones(shape, kind)
    if is_norm(name):
        return np.full(shape, 1 - config.norm_offset, kind)
    if name.endswith(".bias"):
        return np.zeros(shape, kind)
    if ".act_fn." in name:
        return np.full(shape, XIELU[name.rpartition(".")[2]], kind)
    array = np.random.default_rng(seed).standard_normal(shape, FLOAT32)
    return (array * FLOAT32.type(config.initializer_range)).astype(kind)
