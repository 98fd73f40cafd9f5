"""Caches of keys and values for generation, in order and in pages."""
