"""The error message for a package that the command line needs and that is not installed."""

EXTRA = "pip install 'unsloth_cupy[cli]'"


def missing(error: ModuleNotFoundError) -> str:
    """Return a message that names the missing package and how to install it."""
    return f"the command line needs the package {error.name}; install it with {EXTRA}"
