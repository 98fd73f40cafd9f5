"""The config of the small Llama that ``finetune`` creates if no model is named."""

from typing import Any

from ...errors import ConfigError
from ..data.tokenizer import END
from ..naming import named

# quantization_config of a model that rounds its weights to -1, 0 and 1 in every call
ONLINE = {
    "quant_method": "bitnet",
    "linear_class": "autobitlinear",
    "quantization_mode": "online",
    "modules_to_not_convert": ["lm_head"],
}
SIZES = {"layers": 4, "hidden": 128, "vocabulary": 1024}


def small_llama(tokenizer: Any, tokens: int, layers: int, hidden: int) -> dict[str, Any]:
    """Return the config.json of a new model.

    The head dimension is 32, or ``hidden`` if ``hidden`` is not a multiple of 32.

    Raises
    ------
    ConfigError
        ``hidden`` is odd.
    """
    if hidden % 2:
        why = "rotary embeddings rotate pairs of elements"
        raise ConfigError(f"{named(hidden=hidden)} is odd, but {why}; pass an even number")
    head = 32 if hidden % 32 == 0 else hidden
    end = tokenizer.token_to_id(END)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": hidden,
        "intermediate_size": hidden * 8 // 3 // 8 * 8 or 8,  # as many weights as 2 x 4 hidden
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // head,
        "num_key_value_heads": hidden // head,
        "head_dim": head,
        "hidden_act": "silu",
        "max_position_embeddings": max(2048, tokens),
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "initializer_range": hidden**-0.5,  # products have the variance of their input
        "bos_token_id": end,
        "eos_token_id": end,
        "pad_token_id": end,
        "torch_dtype": "float32",
    }
