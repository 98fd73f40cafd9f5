"""Parsing of config.json: one ``Config`` for all families, and the names of its tensors."""
