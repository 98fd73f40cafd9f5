"""Frozen quantized weights (NF4, FP4, int8, ternary) and matrix products with them."""
