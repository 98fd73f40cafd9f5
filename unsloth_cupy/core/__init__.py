"""The path of a call, from the signature of its op to the launch of its kernel."""
