"""Language models loaded from Hugging Face folders and computed with the ops of this package.

model = load("folder")                       config.json and *.safetensors
model = from_torch(model)                    the weights of a live model of transformers
model.generate(tokens, max_new_tokens=20)

Names are imported on first access: ``import unsloth_cupy`` does not import their modules.
"""

import typing

from ..core import names as _names

if typing.TYPE_CHECKING:
    from .adapters.adapter import Adapter as Adapter
    from .adapters.adapter import create_adapter as create_adapter
    from .adapters.merging import merge as merge
    from .folders.create import create as create
    from .folders.folder import load as load
    from .gguf.export import export_adapter_gguf as export_adapter_gguf
    from .gguf.export import export_gguf as export_gguf
    from .quantized import quantize as quantize
    from .text.tokenizer import Tokenizer as Tokenizer
    from .torch_model import from_torch as from_torch
    from .transformer import Transformer as Transformer
    from .verifying.verify import Verification as Verification
    from .verifying.verify import verify as verify

_HOMES = {
    "Adapter": "adapters.adapter",
    "create_adapter": "adapters.adapter",
    "create": "folders.create",
    "load": "folders.folder",
    "export_adapter_gguf": "gguf.export",
    "export_gguf": "gguf.export",
    "from_torch": "torch_model",
    "merge": "adapters.merging",
    "quantize": "quantized",
    "Tokenizer": "text.tokenizer",
    "Transformer": "transformer",
    "Verification": "verifying.verify",
    "verify": "verifying.verify",
}

_names.publish(__name__, _HOMES)
