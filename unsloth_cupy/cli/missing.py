"""What to say where the command line lacks a package."""

EXTRA = "pip install 'unsloth_cupy[cli]'"


def missing(error: ModuleNotFoundError) -> str:
    """Return what to install when a module is missing."""
    return f"the command line needs the package {error.name}; install it with {EXTRA}"
