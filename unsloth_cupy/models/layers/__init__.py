"""The parts of a network: blocks, attention of every kind, experts, the head."""
