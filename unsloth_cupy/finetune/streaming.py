"""The old place of ``models.generation.streaming``."""

from ..models.generation.streaming import StopStrings, TextStream

__all__ = ["StopStrings", "TextStream"]
