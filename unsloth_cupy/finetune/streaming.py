"""The old place of ``models.streaming``."""

from ..models.streaming import StopStrings, TextStream

__all__ = ["StopStrings", "TextStream"]
