"""Cross-entropy, with the head before it or without."""
