"""Elementwise arithmetic, casts, reductions, reshaping and indexing."""
