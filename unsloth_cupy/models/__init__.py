"""Language models read from Hugging Face folders: the ops put to work.

model = load("folder")                       config.json and *.safetensors
model.generate(tokens, max_new_tokens=20)
"""

from .folder import create as create
from .folder import load as load
from .transformer import Transformer as Transformer
