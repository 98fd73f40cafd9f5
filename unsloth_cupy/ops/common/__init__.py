"""What the launches and definitions of several families share; no op lives here."""
