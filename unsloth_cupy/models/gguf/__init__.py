"""GGUF files, which llama.cpp and its relatives read: a whole model with its tokenizer in one file.

``export.py`` writes them; ``_families.py`` lists what llama.cpp computes, ``_metadata.py`` and
``_tokenizer.py`` return the keys of a file, ``_tensors.py`` its tensors, in the types of
``_types.py``.
"""

TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "tq1_0", "tq2_0")  # the values of export's kind
