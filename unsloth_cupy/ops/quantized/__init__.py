"""Matrices kept in fewer bits."""
