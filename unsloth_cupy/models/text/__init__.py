"""Conversion of text to tokens and back: tokenizers, chat templates, predictions for texts."""
