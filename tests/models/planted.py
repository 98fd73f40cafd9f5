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
) -> Path:
    """Write a copy of a file with other values of keys and tensors; None removes one.

    A function as the value of a key or a tensor gets the old value.  ``swapped`` are two tensors
    that change places.
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
        if edit is None:
            continue
        if swapped and tensor.name in swapped:
            tensor_data = every[swapped[tensor.name == swapped[0]]].data
        else:
            shape = tuple(int(n) for n in reversed(tensor.shape))
            dense = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(shape)
            changed = edit(dense.copy())
            if changed is dense or np.array_equal(changed, dense):
                tensor_data = tensor.data
            else:
                changed = np.ascontiguousarray(changed, np.float32)
                tensor_data = changed  # which may be not finite in float32
                if tensor.tensor_type.name != "F32":
                    tensor_data = packed("planted", tensor.name, changed, tensor.tensor_type)
                    tensor_data = tensor_data.reshape(*changed.shape[:-1], -1)
        out.add_tensor(tensor.name, tensor_data, raw_dtype=tensor.tensor_type)
    assert not tensors, f"the file has no {[*tensors]}"
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return file
