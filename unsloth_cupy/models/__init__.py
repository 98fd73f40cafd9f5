"""Language models read from Hugging Face folders: the ops put to work.

model = load("folder")                       config.json and *.safetensors
model.generate(tokens, max_new_tokens=20)
"""

from .adapter import Adapter as Adapter
from .adapter import create_adapter as create_adapter
from .folder import create as create
from .folder import load as load
from .transformer import Transformer as Transformer
