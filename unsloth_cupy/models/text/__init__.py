"""From text to tokens and back: tokenizers, chat templates, predictions for a text."""
