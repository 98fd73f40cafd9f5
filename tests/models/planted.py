"""GGUF files with a planted fault: keys and tensors of a right file, changed."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

Edit = Callable[[np.ndarray], np.ndarray] | None


def planted(
    source: Path,
    file: Path,
    keys: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Edit] | None = None,
    swapped: tuple[str, str] | None = None,
    types: Mapping[str, str] | None = None,
) -> Path:
    """Write a copy of a file with other values of keys and tensors; None removes one.

    A function as the value of a key or a tensor gets the old value.  ``swapped`` are two tensors
    that change places; ``types`` are other types of tensors.
    """
    import gguf

    from unsloth_cupy.models.gguf._types import packed

    reader = gguf.GGUFReader(source)
    values = {n: f for n, f in reader.fields.items() if not n.startswith("GGUF.")}
    name = values.pop("general.architecture").contents()
    out, keys, tensors = gguf.GGUFWriter(file, name), dict(keys or {}), dict(tensors or {})
    keys = {key.replace("ARCH", name): value for key, value in keys.items()}
    for key, entry in values.items():
        value = keys.pop(key, entry.contents())
        value = value(entry.contents()) if callable(value) else value
        if value is not None:
            out.add_key_value(key, value, entry.types[0], entry.types[-1])
    for key, value in keys.items():
        kind = gguf.GGUFValueType.get_type(value)
        out.add_key_value(key, value, kind)
    every = {each.name: each for each in reader.tensors}
    for tensor in reader.tensors:
        edit = tensors.pop(tensor.name, lambda array: array)
        name = (types or {}).get(tensor.name, tensor.tensor_type.name)
        kind = gguf.GGMLQuantizationType[name]
        if edit is None:
            continue
        if swapped and tensor.name in swapped:
            tensor_data = every[swapped[tensor.name == swapped[0]]].data
        else:
            shape = tuple(int(n) for n in reversed(tensor.shape))
            dense = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(shape)
            changed = edit(dense.copy())
            if kind == tensor.tensor_type and np.array_equal(changed, dense):
                tensor_data = tensor.data
            else:
                changed = np.ascontiguousarray(changed, np.float32)
                tensor_data = changed  # which may be not finite in float32
                if kind.name != "F32":
                    tensor_data = packed("planted", tensor.name, changed, kind)
                    tensor_data = tensor_data.reshape(*changed.shape[:-1], -1)
        out.add_tensor(tensor.name, tensor_data, raw_dtype=kind)
    assert not tensors, f"the file has no {[*tensors]}"
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return file
