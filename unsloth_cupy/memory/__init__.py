"""What a step will hold, and what it holds."""
