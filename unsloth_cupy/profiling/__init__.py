"""What a call does, how fast it could be, and how fast it was."""
