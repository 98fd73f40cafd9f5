"""PTX to C++: ``unit(text, "rms_norm_forward")`` is a unit that includes ptx.hpp."""

from ..cuda_on_cpu import build
from . import arithmetic, machine  # noqa: F401  they say what they know
from .function import Function, variable
from .parse import UnknownError, functions


def unit(text: str, name: str) -> str:
    """Return the C++ of an entry of a PTX module, and of the functions that it may call."""
    declared, bodies = functions(text)
    variables = [variable(statement) for statement in declared]
    places: dict[tuple[str, int], int] = {("?", 0): 0}
    wanted = [body for body in bodies if not body.entry or body.name == name]
    if not wanted or not wanted[-1].entry:
        raise UnknownError(f"no entry {name}")
    made = [Function(body, {n: space for space, n, _ in variables}, places) for body in wanted]
    lines = [
        *(code for *_, code in variables),
        "static const Where W[] = {",
        *(f'  {{"{file}", {line}}},' for file, line in places),
        "};",
        *(f"static void {f.name}(void **a);" for f in made[:-1]),
        'extern "C" {',
        f"extern const int emu_arity = {len(wanted[-1].parameters)};",
        f"extern const unsigned emu_cluster[3] = {{{', '.join(map(str, wanted[-1].cluster))}}};",
        *(line for f in made for line in f.code),
        "}",
    ]
    has_buffer = any(line.startswith("#define") for line in lines)
    buffer = f"BUFFER({build.DYNAMIC_SHARED})" if has_buffer else "NO_BUFFER"
    return "\n".join([buffer, *lines, ""])
