"""What a network is made of: blocks, attention of every kind, experts, the head."""
