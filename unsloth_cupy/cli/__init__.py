"""The command line ``unsloth-cupy``: info, check, bench, finetune, generate, plan."""

EXTRA = "pip install 'unsloth_cupy[cli]'"


def main() -> None:
    """Run the command line, or say in one line what to install for it."""
    try:
        from .commands import group
    except ModuleNotFoundError as error:
        raise SystemExit(f"Error: {missing(error)}") from None
    group(prog_name="unsloth-cupy")


def missing(error: ModuleNotFoundError) -> str:
    """Return what to install when a module is missing."""
    return f"the command line needs the package {error.name}; install it with {EXTRA}"
