"""Explains and times calls of ops, and compares them with the roofline."""
