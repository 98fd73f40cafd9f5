"""The error message for a missing package of the command line."""

EXTRA = "pip install 'unsloth_cupy[cli]'"


def missing(error: ModuleNotFoundError) -> str:
    """Return a message that names the missing package and how to install it."""
    return f"the command line needs the package {error.name}; install it with {EXTRA}"
