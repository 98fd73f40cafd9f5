"""Fine-tuning of a model on a text: training data, trainer, run folder."""
