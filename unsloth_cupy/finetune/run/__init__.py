"""A run: its settings, trainer, loop, ranks, folder, reports."""
