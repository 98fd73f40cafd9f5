"""Cross entropy of logits, or of an output head's input and weight."""
