"""Code shared by the launches and definitions of several op families; it defines no op."""
