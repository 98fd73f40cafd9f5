"""Training methods: one small class per method."""
