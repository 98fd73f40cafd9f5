"""Ops judged and timed: cases, clock, peers, tables."""
