"""Checks and times ops: cases, clocks, peers and tables."""
