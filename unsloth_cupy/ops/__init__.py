"""The ops, one module each: formula, NumPy definition, kernel launch and backward."""

# ops that models alone call: they are known as soon as any op is
from .attention import rope_append as rope_append
from .linear import linears as linears
