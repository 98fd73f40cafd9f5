"""Normalisation of rows: layer norm and RMS norm."""
