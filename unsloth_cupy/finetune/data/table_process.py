"""Reads Parquet and Arrow files in a separate process: the library for them trusts its input.

This file is run as a script that writes JSON lines: [rows, ""] first, then an object for each row,
or ["", problem] where it cannot go on.  Its memory is limited, where the system can, so that a
small file that grows ends in an error.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

MEMORY = 1 << 30  # bytes beyond those of the libraries
ROWS = 100  # at a time
BUFFER = 1 << 16  # bytes read at a time: pages come one by one


def plain(value: Any) -> Any:
    """Return what JSON has in place of a value of another kind."""
    if isinstance(value, bytes):
        with suppress(UnicodeDecodeError):
            return value.decode()
        return {"bytes": len(value)}  # no text, and said so where one is read
    return str(value)


def without_absent(value: Any, inner: bool = False) -> Any:
    """Return a value without the keys that have none: a table gives all objects the same keys."""
    if isinstance(value, dict):
        items = value.items()
        return {k: without_absent(v, True) for k, v in items if v is not None or not inner}
    if isinstance(value, list):
        return [without_absent(each, True) for each in value]
    return value


def batches(path: str, kind: str) -> tuple[int, Iterator[Any]]:
    """Return the number of rows, or 0 if only reading tells it, and batches of them."""
    import pyarrow as pa

    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    if kind == "Parquet":
        from pyarrow import parquet

        file = parquet.ParquetFile(path, buffer_size=BUFFER, pre_buffer=False)
        rows = file.metadata.num_rows
        return rows, file.iter_batches(batch_size=ROWS, use_threads=False)
    source = pa.OSFile(path)
    begins = source.read(6)
    source.seek(0)
    if begins == b"ARROW1":
        reader = pa.ipc.open_file(source)
        return 0, (reader.get_batch(number) for number in range(reader.num_record_batches))
    return 0, iter(pa.ipc.open_stream(source))


def write(path: str, kind: str) -> str:
    """Write the rows of a file, and return what is wrong with it, or ""."""
    count, parts = batches(path, kind)
    print(json.dumps([count, ""]), flush=True)
    for part in parts:
        for name, times in Counter(part.schema.names).items():
            if times > 1:
                return f"{times} columns are called {name}"
        for start in range(0, part.num_rows, ROWS):
            for row in part.slice(start, ROWS).to_pylist():
                print(json.dumps(without_absent(row), default=plain))
    return ""


def main() -> None:
    """Write the rows of the file that the command names, within the limit of memory."""
    import pyarrow.parquet  # noqa: F401 -- before the limit, which is for what it reads

    with suppress(ImportError, ValueError, OSError):  # systems without such a limit
        import resource

        with open("/proc/self/statm", encoding="ascii") as file:
            used = int(file.read().split()[0])
        limit = used * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    problem = ""
    try:
        problem = write(*sys.argv[1:])
    except BrokenPipeError:
        pass
    except MemoryError:
        problem = f"a part of it needs more than {MEMORY >> 30} GiB of memory"
    except Exception as error:  # a broken file may fail in any way
        problem = " ".join(str(error).split())[:300] or type(error).__name__
    if problem:
        print(json.dumps([0, problem]), flush=True)


if __name__ == "__main__":
    main()
