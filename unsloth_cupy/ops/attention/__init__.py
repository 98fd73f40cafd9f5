"""Attention over dense batches, packed sequences and paged caches; appending to KV caches."""
