"""The ops, one module each: formula, NumPy definition, kernel launch and backward."""
