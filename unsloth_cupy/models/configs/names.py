"""Names of tensors in files, adapters and models of transformers, and the names of parameters.

    model.layers.0.mlp.up_proj.weight                        the parameter's name: a language model
    layers.0.mlp.up_proj.weight                              a body without its head
    model.language_model.layers.0.mlp.up_proj.weight         a multimodal model
    language_model.model.layers.0.mlp.up_proj.weight         a multimodal model in older files
    backbone.layers.0.mixer.in_proj.weight                   a model without attention
    encoder.layer.0.attention.self.query.weight              BERT: model.layers.0...

Only the language model of a multimodal model is loaded.
"""

import re
from typing import Any

TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# of the inputs that each layer has: a table, and a projection of the embeddings
TABLE_OF_LAYERS = "model.embed_tokens_per_layer.weight"
INTO_LAYERS, NORM_OF_INPUTS = "per_layer_model_projection", "per_layer_projection_norm"
PROJECTION = "model.embedding_projection.weight"  # of the last states
ADAPTED = "base_model.model."  # prefix of an adapter's tensors
SCORE, SCORE_BIAS = "score.weight", "score.bias"  # head of a classifier
TEXT, IMAGES = "model.", "model.language_model."  # prefixes of a body's modules
BARE = ("", "language_model.")  # the same without a head
BACKBONE, EMBEDDINGS = "backbone.", "model.embeddings.weight"  # Mamba's names of a body and a table
BODY = re.compile(
    r"(?:(?:model|language_model|text_model|backbone|bert)\.){0,3}"
    r"(?=(?:embed_tokens|embeddings|layers|norm|norm_f|final_layernorm|embed_tokens_per_layer"
    r"|per_layer_model_projection|per_layer_projection_norm|embedding_norm|final_norm"
    r"|encoder\.layer|pooler|ple|embedding_projection)\.)"
)
HEADS = re.compile(r"language_model\.(?=lm_head\.)")
TABLES = dict.fromkeys(  # names of the embedding table
    (
        EMBEDDINGS,
        "model.embeddings.word_embeddings.weight",
        "model.embeddings.tok_embeddings.weight",
    ),
    TABLE,
)
LABELLED = {"classifier.weight": SCORE, "classifier.bias": SCORE_BIAS}  # of encoders
BERT = "model.encoder.layer."  # for model.layers.
OF_BERT = re.compile(r"layers\.(?=\d+\.(attention\.(self|output)|intermediate|output)\.)")
ROLES = {
    **{"input_linear": "gate_up_proj", "output_linear": "down_proj", "w1": "gate_proj"},
    **dict.fromkeys(("dense", "out_proj"), "o_proj"),
    **dict.fromkeys(("c_fc", "fc1", "w3"), "up_proj"),
    **dict.fromkeys(("c_proj", "fc2", "w2"), "down_proj"),
    **dict.fromkeys(("query_layernorm", "q_layernorm"), "q_norm"),
    **dict.fromkeys(("key_layernorm", "k_layernorm"), "k_norm"),
}
INDEXER = ".indexer."  # in names of parameters that only choose keys
ROUTERS = (
    *(".gate.weight", ".router.weight", ".gate.wg.weight", ".router.proj.weight"),
    ".router.classifier.weight",
)
LEFT_OUT = re.compile(
    r"(?:model\.)?(?:vision_tower|vision_model|visual|image_tower|video_tower|audio_tower|connector"
    r"|multi_modal_projector|image_newline|embed_vision|embed_audio)(?:\.|$)|.*rotary_emb\.inv_freq$"
)


def parameter_name(stored: str) -> str | None:
    """Return the parameter's name for the name of a stored tensor; None: it is not loaded."""
    if LEFT_OUT.match(stored):
        return None
    if body := BODY.match(stored):
        own = stored if body[0] == TEXT else TEXT + stored[body.end() :]
        own = own.replace(BERT, "model.layers.", 1) if own.startswith(BERT) else own
        return TABLES.get(own, own)
    return LABELLED.get(stored) or HEADS.sub("", stored)


def is_norm(name: str) -> bool:
    """Return whether a parameter is the weight of a norm, which may have a row for each head."""
    endings = "norm.weight", "LayerNorm.weight", "layernorm_1.weight", "layernorm_2.weight"
    return name.endswith(endings)


def is_attention(config: Any, name: str) -> bool:
    """Return whether a parameter or a module belongs to the attention of a block."""
    layer = name.removeprefix("model.layers.").partition(".")[0]
    return f".{config.names.attention}." in name and config.attends(int(layer))


def is_router(name: str) -> bool:
    """Return whether a parameter is the weight of a router, which stays dense."""
    return name.endswith(ROUTERS)


def is_stack(name: str) -> bool:
    """Return whether a parameter is a stack of the matrices of experts."""
    return name.endswith((".experts.gate_up_proj", ".experts.up_proj", ".experts.down_proj"))


def role_of(module: str) -> str:
    """Return the name that most families give a module."""
    return ROLES.get(module, module)


def stored_name(module: str, prefix: str) -> str:
    """Return a module's name in a model whose body has this prefix."""
    if not module.startswith(TEXT):
        return module
    own = module.removeprefix(TEXT)
    return prefix + (f"encoder.layer.{own[len('layers.') :]}" if OF_BERT.match(own) else own)
