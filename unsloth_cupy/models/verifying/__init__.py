"""Comparison of a file or folder with the model that was trained: ``verify``."""
