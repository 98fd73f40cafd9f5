"""Names of tensors in files, adapters and models of transformers, and which parameter each is.

    model.layers.0.mlp.up_proj.weight                        a parameter; in a language model
    layers.0.mlp.up_proj.weight                              of a body without its head
    model.language_model.layers.0.mlp.up_proj.weight         in a model that also reads images
    language_model.model.layers.0.mlp.up_proj.weight         the same, in older files

The vision tower of a model that reads images is left out.
"""

import re

TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ADAPTED = "base_model.model."  # before the names of an adapter's tensors
SCORE, SCORE_BIAS = "score.weight", "score.bias"  # of a classifier
TEXT, IMAGES = "model.", "model.language_model."  # before the names of a body's modules
BODY = re.compile(r"(?:(?:model|language_model)\.){0,3}(?=(?:embed_tokens|layers|norm)\.)")
HEADS = re.compile(r"language_model\.(?=lm_head\.)")
LEFT_OUT = re.compile(
    r"(?:model\.)?(?:vision_tower|multi_modal_projector)\.|.*rotary_emb\.inv_freq$"
)


def parameter_name(stored: str) -> str | None:
    """Return the name of the parameter, or of a part of one, that a tensor is; None: left out."""
    if LEFT_OUT.match(stored):
        return None
    if body := BODY.match(stored):
        return stored if body[0] == TEXT else TEXT + stored[body.end() :]
    return HEADS.sub("", stored)


def stored_name(module: str, prefix: str) -> str:
    """Return the name of a module in a model whose body has this prefix."""
    return prefix + module.removeprefix(TEXT) if module.startswith(TEXT) else module
