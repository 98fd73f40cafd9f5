"""The machine room: a call, from its signature to its kernel."""
