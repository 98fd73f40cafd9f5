"""Rotary position embeddings, and their tables of cosines and sines."""
