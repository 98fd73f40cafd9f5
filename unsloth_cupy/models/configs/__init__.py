"""What a config.json says: one ``Config`` for all families, and the names of its tensors."""
