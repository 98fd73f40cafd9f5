"""The ops, one module each: formula, definition, launch, backward."""
