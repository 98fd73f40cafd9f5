"""Rotary position embeddings, and the tables that they read."""
