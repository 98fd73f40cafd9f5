"""Reads Parquet and Arrow files in a separate process, as pyarrow trusts its input.

This file runs as a script that writes JSON lines: first [number of rows, ""], then an object per
row, and [0, problem] if it fails.  Its memory is limited where the system supports limits, so a
decompression bomb ends in an error.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

MEMORY = 1 << 30  # limit in bytes, in addition to the libraries
ROWS = 100  # rows per batch
BUFFER = 1 << 16  # bytes per read: reads pages one by one


def plain(value: Any) -> Any:
    """Convert a value that JSON cannot store."""
    if isinstance(value, bytes):
        with suppress(UnicodeDecodeError):
            return value.decode()
        return {"bytes": len(value)}  # not text; code that expects text reports it
    return str(value)


def without_absent(value: Any, inner: bool = False) -> Any:
    """Remove the null keys of nested objects: in a table, all objects have the same keys."""
    if isinstance(value, dict):
        items = value.items()
        return {k: without_absent(v, True) for k, v in items if v is not None or not inner}
    if isinstance(value, list):
        return [without_absent(each, True) for each in value]
    return value


def batches(path: str, kind: str) -> tuple[int, Iterator[Any]]:
    """Return the number of rows, 0 if unknown before reading, and an iterator of batches."""
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
    """Write the rows of a file; return the problem of an invalid file, or ""."""
    count, parts = batches(path, kind)
    print(json.dumps([count, ""]), flush=True)
    for part in parts:
        for name, times in Counter(part.schema.names).items():
            if times > 1:
                return f"{times} columns have the name {name}"
        for start in range(0, part.num_rows, ROWS):
            for row in part.slice(start, ROWS).to_pylist():
                print(json.dumps(without_absent(row), default=plain))
    return ""


def main() -> None:
    """Write the rows of the file in the command line, within the memory limit."""
    import pyarrow.parquet  # noqa: F401 -- before the limit, which does not count it

    with suppress(ImportError, ValueError, OSError):  # systems without memory limits
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
        problem = f"a batch of rows needs more than {MEMORY >> 30} GiB of memory"
    except Exception as error:  # a broken file may fail in any way
        problem = " ".join(str(error).split())[:300] or type(error).__name__
    if problem:
        print(json.dumps([0, problem]), flush=True)


if __name__ == "__main__":
    main()
