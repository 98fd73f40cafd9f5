"""The keys of a GGUF file; a key that is not read raises an error."""

from typing import Any

from ...core.dtypes import FLOAT32
from ...errors import ConfigError
from .reading import GgufFile

# Keys whose values have no effect here.
HARMLESS = {
    *("vocab_size", "attention.causal", "tensor_data_layout"),
    *("use_parallel_residual", "rope.scaling.yarn_ext_factor"),
}
UNREAD = {  # keys of absent layers, by architecture: a Granite hybrid may have only attention
    "granite": {
        *("ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "ssm.inner_size"),
        *("ssm.time_step_rank", "expert_shared_feed_forward_length"),
    },
    "granitehybrid": {"expert_shared_feed_forward_length"},  # as it may have no experts
}


class Keys:
    """The keys of a file's architecture; ``check_rest`` raises for keys that were not read."""

    def __init__(self, file: GgufFile) -> None:
        self.file, self.name = file, str(file.values.get("general.architecture"))
        prefix = f"{self.name}."
        values = file.values.items()
        self.left = {k.removeprefix(prefix): v for k, v in values if k.startswith(prefix)}

    def take(self, key: str, default: Any = None) -> Any:
        """Return the value of a key; a list of equal numbers, one per layer, becomes one number."""
        value = self.left.pop(key, default)
        if isinstance(value, list) and value and not isinstance(value[0], bool):
            if len({*value}) > 1:
                self.refuse(f"{self.name}.{key} differs by layer ({str(value)[:60]})")
            return value[0]
        return value

    def of_layers(self, key: str, layers: int) -> list[Any]:
        """Return the values of a required key for the layers; one number is for all of them."""
        value = self.left.pop(key, None)
        if isinstance(value, list) and len(value) >= layers:
            return value[:layers]
        missing = value is None or isinstance(value, list)
        return self.refuse(f"{self.name}.{key} is {value}") if missing else [value] * layers

    def need(self, key: str) -> Any:
        """Return the value of a required key."""
        value = self.take(key)
        return self.refuse(f"{self.name}.{key} is missing") if value is None else value

    def refuse(self, problem: str) -> Any:
        """Raise a ConfigError with the path of the file."""
        cure = "use the model's Hugging Face folder"
        raise ConfigError(f"{self.file.path}: {problem}; {cure}")

    def check_rest(self) -> None:
        """Raise for a key that was not read, unless its value is empty, such as 0 or False."""
        harmless = HARMLESS | UNREAD.get(self.name, set())
        for key, value in self.left.items():
            if key not in harmless and value not in (None, False, 0, "", "none", []):
                self.refuse(f"{self.name}.{key} is {str(value)[:60]}, which is not supported")


def shortest(value: Any) -> float:
    """Return a float32 as the shortest number that rounds to it: 1e-05 in place of 9.99...e-06."""
    return float(str(FLOAT32.type(value)))
