"""Rotary embeddings, and the tables they read."""
