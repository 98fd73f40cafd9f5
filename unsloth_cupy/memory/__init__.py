"""Plans and measures the memory of a training step."""
