"""What inference remembers: caches of keys and values, in order and in pages."""
