"""Files of JSON whose values have other types than a program writes: one typed error each."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from unsloth_cupy import models
from unsloth_cupy.errors import MOST, ConfigError, UnslothCupyError
from unsloth_cupy.models.adapters import adapter_folder
from unsloth_cupy.models.adapters.adapter_base import KINDS, base_of
from unsloth_cupy.models.folders import other_weights
from unsloth_cupy.models.folders.other_weights import KEYS, check_quantization

from .test_adapter import FOLDER, LLAMA

LONG = "a" * 10_000
VALUES: list[Any] = [
    LONG, "a/" * 5_000, [LONG], ["a"] * 5_000, {}, {"a": {}}, {LONG: LONG}, [[1]], [{}], 1e308, -1,
    2**70, True, "", "\0", [None],
]  # fmt: skip


def outcome(call: Any) -> None:
    """Let a call work, or end in an error of this package that is not long."""
    message = "works"
    try:
        call()
    except UnslothCupyError as error:
        message = str(error)
    assert 0 < len(message) <= MOST


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("key", [*sorted({*adapter_folder.KNOWN, *KINDS}), "new", "r" * 9999])
def test_every_field_of_an_adapter(key: str, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    shutil.copytree(FOLDER, folder)
    path = folder / "adapter_config.json"
    settings = json.loads(path.read_text())
    for value in VALUES:
        path.write_text(json.dumps(settings | {key: value}))
        outcome(lambda: models.load(LLAMA, lora=folder))
        outcome(lambda: base_of(folder))


@pytest.mark.parametrize("method", KEYS)
def test_every_field_of_a_quantization_config(method: str) -> None:
    weights = {"num_bits": 4, "type": "int"}
    for key in [*KEYS[method], *other_weights.KINDS, "new"]:
        for value in VALUES:
            facts = {"quant_method": method, key: value}
            outcome(lambda facts=facts: check_quantization(facts))  # type: ignore[misc]
            group = {"weights": weights | {key: value}, "targets": ["Linear"]}
            facts = {"quant_method": method, "config_groups": {"g": group}}
            outcome(lambda facts=facts: check_quantization(facts))  # type: ignore[misc]


def test_types_that_no_program_writes_are_named() -> None:
    for method, key, value in (
        *(("gptq", "group_size", "128"), ("awq", "zero_point", 1), ("gptq", "sym", "false")),
        ("fp8", "weight_block_size", {}),
    ):
        with pytest.raises(ConfigError, match=f"{key} is .*; it must be "):
            check_quantization({"quant_method": method, key: value})


def test_messages_cut_values_and_keep_their_ends() -> None:
    short = "rope_scaling is {'type': 'x'}; write 'linear'"
    assert str(ConfigError(short)) == short
    path = "/".join(["folder" * 40] * 8)
    assert str(ConfigError(f"{path} is missing")) == f"{path} is missing"
    for value in (LONG, ["a"] * 9999, LONG + " b" * 9999):
        message = str(ConfigError(f"config: key={value!r} is wrong; pass another"))
        assert len(message) <= MOST
        assert message.startswith("config: key=")
        assert message.endswith(" is wrong; pass another")
