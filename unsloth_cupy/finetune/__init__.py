"""A model learns a text: lessons, trainer, run folder."""
