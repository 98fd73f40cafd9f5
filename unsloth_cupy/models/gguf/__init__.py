"""GGUF files: a whole model with its tokenizer in one file, for llama.cpp and its relatives.

``export.py`` writes them.  ``_families.py`` describes what llama.cpp computes, ``_metadata.py`` and
``_tokenizer.py`` return the keys of a file, ``_tensors.py`` its tensors, in the types of
``_types.py``.
"""

# allowed values of export_gguf's ``kind``
TYPES = (
    *("f32", "f16", "bf16", "q8_0", "q6_k", "q5_k_m", "q5_k_s", "q5_1", "q5_0", "q4_k_m", "q4_k_s"),
    *("q4_1", "q4_0", "q3_k_l", "q3_k_m", "q3_k_s", "q2_k", "tq1_0", "tq2_0"),
)
MODULES = {"2_Dense": "dense_2", "3_Dense": "dense_3"}  # llama.cpp's names of Dense modules
POOLINGS = {"mean": 1, "cls": 2, "last": 3}  # numbers of llama.cpp's poolings
