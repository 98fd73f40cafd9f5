"""Training data as people bring them: files, packings, folders, forms, and what is refused."""

import bz2
import csv
import gzip
import hashlib
import io
import itertools
import json
import os
import re
import struct
import subprocess
import sys
import time
import tracemalloc
from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from datetime import date
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unsloth_cupy.errors import ConfigError
from unsloth_cupy.finetune import Settings, Trainer, inspect_data, read_data
from unsloth_cupy.finetune.data import data_files, forms, labels, messages, records, tables
from unsloth_cupy.finetune.data.data_files import content as found_content
from unsloth_cupy.finetune.data.forms import content_of, is_header
from unsloth_cupy.finetune.data.messages import LEARNED
from unsloth_cupy.finetune.data.records import Record, Records, Stored
from unsloth_cupy.finetune.data.text import Text
from unsloth_cupy.finetune.listener import Listener, hearing
from unsloth_cupy.finetune.run import data_report
from unsloth_cupy.finetune.run.data_report import Piece
from unsloth_cupy.models.text.chat import REASONING

from ..cli.test_cli import GOLDEN, LLAMA, assert_one_clear_error, run

ROWS: list[dict[str, Any]] = [
    {"question": f'What is "{i}",\nplus 1?', "answer": f"It is {i + 1}; né.", "id": i}
    for i in range(30)
]
LINES = "\n".join(map(json.dumps, ROWS))
SAY = {"role": "assistant", "content": "b"}
ASK = {"role": "user", "content": "a"}


def table(rows: list[dict[str, Any]], delimiter: str = ",") -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, rows[0], delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def parquet(rows: list[dict[str, Any]], path: Path, **options: Any) -> bytes:
    pa = pytest.importorskip("pyarrow", reason="needs the extra `data`")
    from pyarrow import parquet

    parquet.write_table(pa.Table.from_pylist(rows), path, **options)
    return path.read_bytes()


def packed(data: bytes, suffix: str) -> bytes:
    if suffix == ".zst":
        zstandard = pytest.importorskip("zstandard", reason="needs the extra `data`")
        return bytes(zstandard.compress(data))
    return {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress}[suffix](data)


def contents(data: Any) -> list[Any]:
    return sorted((record[1:] for record in (*data.train, *data.held_out)), key=repr)


def refusal(path: Any, **options: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        read_data(path, **options)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def written(tmp_path: Path, *rows: Any, name: str = "rows.jsonl") -> Path:
    path = tmp_path / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def nested(times: int) -> Any:
    """A list in a list, and so on."""
    value: list[Any] = []
    for _ in range(times):
        value = [value]
    return value


def rows_in(path: Path, digest: Any = None) -> Iterator[Any]:
    """The rows of a file, before their columns mean anything."""
    (file,), _ = data_files.located(path)
    return tables.rows_of(file, digest or hashlib.sha256())


def one(tmp_path: Path, row: dict[str, Any]) -> Record:
    """The record of a row."""
    data = read_data(written(tmp_path, row, {"text": "other"}))
    assert isinstance(data, Records)
    return next(record for record in (*data.train, *data.held_out) if record.line == 1)


class TestFiles:
    @pytest.mark.parametrize("packing", ["", ".gz", ".zst", ".bz2"])
    @pytest.mark.parametrize(
        "name", ["a.jsonl", "a.ndjson", "a.json", "b.json", "a.csv", "b.csv", "a.tsv", "a.parquet"]
    )
    def test_the_same_rows_in_every_file(self, name: str, packing: str, tmp_path: Path) -> None:
        data = {
            "a.json": lambda: json.dumps(ROWS, indent=1).encode(),
            "b.json": lambda: b"\xef\xbb\xbf" + json.dumps(ROWS, ensure_ascii=False).encode(),
            "a.csv": lambda: b"\xef\xbb\xbf" + table(ROWS),
            "b.csv": lambda: table(ROWS, ";"),
            "a.tsv": lambda: table(ROWS, "\t"),
            "a.parquet": lambda: parquet(ROWS, tmp_path / "plain"),
        }.get(name, LINES.encode)()
        path = tmp_path / (name + packing)
        path.write_bytes(packed(data, packing))
        actual = read_data(path)
        assert isinstance(actual, Records)
        expected = [
            ([ASK | {"content": row["question"]}, SAY | {"content": row["answer"]}], "", "")
            for row in ROWS
        ]
        assert [content[:3] for content in contents(actual)] == sorted(expected, key=repr)
        assert actual.note == f"{path}: 30 rows with question/answer; unused column: id"
        assert (actual.name, actual.forms) == (name[0], {"question/answer": 30})

    @pytest.mark.parametrize("kind", ["csv", "tsv"])
    @pytest.mark.parametrize("columns", [["Unnamed: 0"], ["Unnamed: 0", "Unnamed: 1"]])
    def test_a_table_with_an_index(self, columns: list[str], kind: str, tmp_path: Path) -> None:
        """pandas writes the index first, without a name, and names it as it reads it."""
        rows = [dict.fromkeys(columns, i) | row for i, row in enumerate(ROWS)]
        named = table(rows, "\t" if kind == "tsv" else ",")
        unnamed = named.replace(b"Unnamed: 0", b"").replace(b"Unnamed: 1", b"")
        path, plain = tmp_path / f"a.{kind}", written(tmp_path, *ROWS)
        for data in (named, unnamed):
            path.write_bytes(data)
            actual = read_data(path)
            assert contents(actual) == contents(read_data(plain))
            assert actual.note.endswith(f"unused columns: {', '.join(columns)}, id")
            assert found_content(data, "") == kind.upper()
        path.write_bytes(unnamed.replace(b"answer", b"", 1))
        assert ":1: its first line is " in refusal(path)

    def test_a_list_in_each_line(self, tmp_path: Path) -> None:
        """The cure for a list of messages is not another name of the file."""
        for length in (1, 2**17):
            chat = [ASK | {"content": "a" * length}, SAY]
            message = refusal(written(tmp_path, *[chat] * 3))
            assert "rows.jsonl:1: is [{" in message
            assert message.endswith('not an object; write a chat as {"messages": [...]}')

    def test_a_running_text_is_the_same_packed(self, tmp_path: Path) -> None:
        text = "\n\n".join(f"Paragraph {i}, with commas." for i in range(50)).encode()
        (tmp_path / "t.md").write_bytes(text)
        (tmp_path / "t.md.gz").write_bytes(gzip.compress(text))
        plain, unpacked = read_data(tmp_path / "t.md"), read_data(tmp_path / "t.md.gz")
        assert isinstance(plain, Text)
        assert isinstance(unpacked, Text)
        assert [*plain.blocks()] == [*unpacked.blocks()]
        assert (plain.name, plain.digest) == (unpacked.name, unpacked.digest)

    @pytest.mark.parametrize(
        ("name", "data", "said"),
        [
            ("a.jsonl", table(ROWS), "is named .jsonl but holds CSV; rename it to end in .csv"),
            ("a.csv", LINES.encode(), "is named .csv but holds JSON lines; re"),
            ("a.csv", table(ROWS, "\t"), "is named .csv but holds TSV; rename it to end in .tsv"),
            ("a.txt", LINES.encode(), "is named .txt but holds JSON lines; re"),
            ("a.txt", table(ROWS), "is named .txt but holds CSV; re"),
            ("a.md", json.dumps(ROWS).encode(), "is named .md but holds JSON; re"),
            ("a.jsonl", json.dumps(ROWS).encode(), "is named .jsonl but holds JSON; re"),
            ("a.parquet", LINES.encode(), "is named .parquet but holds JSON lines; re"),
            ("a.parquet", b"", "is empty; copy it again"),
            ("a.jsonl.zst", gzip.compress(LINES.encode()), "holds gzip; rename it to end in .gz"),
            ("a.jsonl.gz", LINES.encode(), "is named .jsonl.gz but holds JSON lines; re"),
            ("a.jsonl", gzip.compress(LINES.encode()), "holds gzip; add .gz to its name"),
            ("a.jsonl", json.dumps(ROWS[0], indent=1).encode(), "holds JSON; rename it to end in"),
            ("a.jsonl", b"PAR1....", "is named .jsonl but holds Parquet; re"),
            ("a.jsonl", LINES.encode("utf-16"), "holds UTF-16; convert it, for example"),
            ("a.csv", b"PK\x03\x04xl", "holds a ZIP archive or a workbook; convert it to one of"),
            ("a.parquet", b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
            ("a.jsonl", b"<!DOCTYPE html><p>", "holds HTML; download the file itself"),
        ],
    )
    def test_a_name_that_contradicts_the_content(
        self, name: str, data: bytes, said: str, tmp_path: Path
    ) -> None:
        path = tmp_path / name
        path.write_bytes(data)
        message = refusal(path)
        assert message.startswith(str(path))
        assert said in message

    @pytest.mark.parametrize("text", ["{not JSON} at all", "a, b and c\n\nd, e", "[1] is a note"])
    def test_a_text_that_looks_like_a_table_is_a_text(self, text: str, tmp_path: Path) -> None:
        path = tmp_path / "a.txt"
        path.write_text(text + "\n\nmore of it " * 9)
        assert isinstance(read_data(path), Text)

    @pytest.mark.parametrize("suffix", [".gz", ".zst", ".bz2"])
    def test_a_file_that_is_cut_off(self, suffix: str, tmp_path: Path) -> None:
        path = tmp_path / f"a.jsonl{suffix}"
        data = packed("".join(json.dumps({"text": os.urandom(50).hex()}) + "\n"
                              for _ in range(9000)).encode(), suffix)  # fmt: skip
        for keep in (len(data) // 2, len(data) - 3):
            path.write_bytes(data[:keep])
            assert refusal(path).startswith(f"{path} is truncated or broken")

    @pytest.mark.usefixtures("no_collections")
    @pytest.mark.parametrize(
        ("name", "data", "said"),
        [
            ("a.csv", b"text,id\nx,1\ny,2,3\n", ":3: has 3 cells, but the first line has 2; qu"),
            ("a.csv", b'text,id\nx,1\n"y,2\nz,3\n', ":3: is not a row ("),
            ("a.csv", b"text,id\nx,1\n\xff,2\n", ":3: is not UTF-8: byte 0 is 0xff; convert"),
            ("a.csv", b"text,text\nx,1\n", ":1: its first line is 'text', 'text'; write unique"),
            ("a.csv", b"a,b\nx,1\n", ":2: has the columns 'a', 'b'; write one of these"),
            ("a.csv", b'text,id\n"x\n\nx",1\n,2\n', ":5: text is empty; write"),
            ("a.json", b'[\n{"text": "x"},\n{"text" "y"}]', ":3: is not JSON (Expecting ':' delim"),
            ("a.json", b'[\n{"text": "x"}', ":2: the list has no end; add"),
            ("a.json", b'[\n{"text": "x"},\n3]', ":3: holds '3]' where an object begins; write"),
            ("a.json", b'[{"text": "x"},\n{"text": 3}]', ":2: object 2: text is 3, not text"),
            ("a.json", b'[{"text": "x"}]\n{"text": "y"}', ":1: has text after its list; write"),
            ("a.jsonl", b'{"messages": ' + b"[" * 99999 + b"\n", ":1: cannot be read as JSON"),
            ("a.json", b'{"data": [' + b"[" * 99999, ":1: cannot be read as JSON"),
            ("a.json", b'[{"text": "' + b"x" * 2**21 + b'"}]', ":1: an object has more than 1 MiB"),
            ("a.csv", b'text,id\n"' + b"x\n" * 2**20 + b'",1', ":2: is not a row (field larger"),
            ("a.jsonl", b'{"text": "a"\n{"text": "b"}', ":1: is not JSON (Expecting ',' delimiter"),
            ("a.jsonl", b'{"' + b" " * 9**5 + b'text": 3}', ":1: has the columns '   "),
            ("a.txt", b"", "is empty"),
            ("a.jsonl", b'{"text": "a"}\n{"text": "a", "text": "b"}',
             ":2: cannot be read as JSON (an object has the key text twice); write one"),
            ("a.jsonl", b'{"messages": [{"role": "user", "content": "a", "content": "b"}]}',
             ":1: cannot be read as JSON (an object has the key content twice); write one"),
            ("a.json", b'[{"text": "a"},\n{"text": "a", "x": {"b": 1, "b": 2}}]',
             ":2: cannot be read as JSON (an object has the key b twice); write a list"),
            ("a.jsonl", b'{"text": "a', ":1: is not JSON (Unterminated string starting at column"),
            *((f"a.{kind}", b"text,id" * (kind == "csv") + b"\n" * 10**6,
               ": more than 100,000 blank lines end here; remove them")
              for kind in ("csv", "jsonl")),
        ],
    )  # fmt: skip
    def test_a_broken_file_is_named_with_its_line(
        self, name: str, data: bytes, said: str, tmp_path: Path
    ) -> None:
        path = tmp_path / name
        path.write_bytes(data)
        message = refusal(path)
        assert f"{path}" in message
        assert said in message
        assert len(message) < 1000

    def test_a_long_json_object_is_read_through_seams(self, tmp_path: Path) -> None:
        rows = [{"text": f"{i} " + 'é\\\n"' * (i * 997)} for i in range(40)]
        path = tmp_path / "a.json"
        path.write_text(json.dumps(rows, ensure_ascii=False, indent=2))
        assert [c[2] for c in contents(read_data(path))] == sorted(row["text"] for row in rows)

    @pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
    @pytest.mark.parametrize("name", ["jsonl", "json", "csv"])
    def test_a_byte_that_is_no_text_is_named_in_its_line(
        self, name: str, mark: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """However the file is divided into pieces."""
        path = tmp_path / f"a.{name}"
        lines = [b'{"text": "%d' % n + b"\xc3\xa9" * n + b'"}' for n in range(9)]
        if name == "json":
            lines = [b"[", *(line + b"," for line in lines[:-1]), lines[-1] + b"]"]
        if name == "csv":
            lines = [b"text,id", *(b"%d" % n + b"\xc3\xa9" * n + b",1" for n in range(9))]
        for number in (3, 8, 9):
            for place in (0, 1, len(lines[number - 1])):
                line = lines[number - 1][:place].decode(errors="ignore").encode()
                broken = [*lines[: number - 1], line + b"\xff" + lines[number - 1][place:]]
                path.write_bytes(mark + b"\n".join(broken + lines[number:]))
                for piece in (1, 7, 32, 10_000):
                    monkeypatch.setattr(tables, "PIECE", piece)
                    said = f"{path}:{number}: is not UTF-8: byte {len(line)} is 0xff; convert"
                    with pytest.raises(ConfigError, match=re.escape(said)):
                        [*rows_in(path)]

    @pytest.mark.parametrize("packing", ["", ".gz", ".bz2"])
    @pytest.mark.parametrize("name", ["jsonl", "json", "csv", "txt"])
    def test_rows_have_their_lines_and_bytes(
        self, name: str, packing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A row begins at its line, and the rows together are the bytes of the file."""
        texts = [f"{n}é" * (n * 7 % 40) + "\n" * (n % 3) + "end" for n in range(60)]
        parts = {
            "jsonl": ["", *(json.dumps({"text": t}) + "\n" * (1 + n % 4)
                            for n, t in enumerate(texts))],
            "json": ["[\n", *(json.dumps({"text": t}, indent=n % 3 or None) + " ,\n"[n % 2 :]
                              for n, t in enumerate(texts[:-1])), '{"text": "end"}\n]'],
            "csv": ["text,id\n", *(f'"{t}",1\n' + "\n" * (n % 3) for n, t in enumerate(texts))],
            "txt": ["", "\n".join(texts)],
        }[name]  # fmt: skip
        data = "".join(parts).encode()
        path = tmp_path / f"a.{name}{packing}"
        path.write_bytes(packed(data, packing))
        ends = np.cumsum([part.count("\n") for part in parts])
        expected = [1 + int(end) for end in ends[:-1]]
        for piece in (64, 2**15):
            monkeypatch.setattr(tables, "PIECE", piece)
            digest = hashlib.sha256()
            rows = [*rows_in(path, digest)]
            assert [row.line for row in rows] == expected
            assert digest.digest() == hashlib.sha256(data).digest()
            read = sum(len(row.read) for row in rows)
            size = path.stat().st_size
            assert size - len(parts[-1].encode()) < read <= size
            assert all(row.read.start == 0 for row in rows)
        actual = [row.values["text"] for row in rows]
        assert actual == (["".join(parts)] if name == "txt" else [*texts[:-1], actual[-1]])

    @pytest.mark.parametrize("name", ["jsonl", "csv", "txt"])
    def test_the_limits_of_a_line(
        self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of its bytes, and of blank lines before it."""
        monkeypatch.setattr(tables, "LONGEST", 100)
        monkeypatch.setattr(tables, "BLANK", 5)
        path = tmp_path / f"a.{name}"

        def read(size: int, blank: int = 0) -> int:
            row = json.dumps({"text": "x" * (size - 13)}) if name == "jsonl" else "x" * (size - 1)
            head = "text,id\n" if name == "csv" else ""
            row = row[:-2] + ",1" if name == "csv" else row
            path.write_text(f"{head}{row}\n" + "\n" * blank + f"{row}\n")
            return len([*rows_in(path)])

        assert read(100) == 2
        assert read(20, 5) == (1 if name == "txt" else 2)
        line = 2 if name == "csv" else 1
        with pytest.raises(ConfigError, match=f":{line}: has more than 0 MiB, and tokenizing it"):
            read(101)
        with pytest.raises(ConfigError, match=f":{line + 6}: more than 5 blank lines end here"):
            read(20, 6)

    def test_the_limit_of_an_object(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tables, "LONGEST", 5000)
        monkeypatch.setattr(tables, "PIECE", 32)
        path = tmp_path / "a.json"
        for size in (4900, 8400):
            rows = [{"text": "x" * each} for each in (4900, size, 10)]
            path.write_text(json.dumps(rows, indent=0))
            if size < 5000:
                assert [row.values for row in rows_in(path)] == rows
                continue
            with pytest.raises(ConfigError, match=r":5: an object has more than 0 MiB; split its"):
                [*rows_in(path)]

    def test_a_long_text_is_cut_between_paragraphs(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """If there are any, else between lines; nothing is lost or moved."""
        monkeypatch.setattr(tables, "LONGEST", 50)
        draws, path = np.random.default_rng(0), tmp_path / "a.txt"
        for _ in range(200):
            words = draws.choice(["é", "word", "x" * 45, "\n", "\n\n", "\r\n\r\n", " "], 40)
            text = re.sub(r"(x{45})(?=.)", r"\1\n", "".join(words).replace("word", "word" * 4))
            text = re.sub(r"([^\n]{20,25})(?=[^\n])", r"\1\n", text)
            path.write_bytes(text.encode())
            rows = [*rows_in(path)]
            parts = [row.values["text"] for row in rows]
            whole = "".join(parts)
            assert text.startswith(whole)
            assert not text[len(whole) :].strip()
            assert max(len(part.encode()) for part in parts) <= 50
            for number, row in enumerate(rows):
                assert row.line == 1 + "".join(parts[:number]).count("\n")
            for one, other in itertools.pairwise(parts):
                assert re.search(r"\n\r?\n$", one) or not re.search(r"\n\r?\n", one)
                assert one.endswith("\n") or re.match(r"\r?\n", other)
            fours = ("".join(parts[n : n + 4]) for n in range(len(parts) - 3))
            assert all(len(four.encode()) > 50 for four in fours)

    @pytest.mark.parametrize(
        ("values", "kind"), [(250, "Parquet"), (250, "Arrow"), (250, "stream"), (0, "Parquet")]
    )
    def test_what_reads_tables(
        self, values: int, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
    ) -> None:
        """Here as in its process: its rows, its limit of memory, and that it has one thread."""
        pa = pytest.importorskip("pyarrow", reason="needs the extra `data`")
        resource = pytest.importorskip("resource", reason="needs a system that limits memory")
        from pyarrow import parquet as files

        from unsloth_cupy.finetune.data import table_process

        rows = [{"text": f"{n}", "raw": [b"a", b"\xff"][n % 2], "day": date(2025, 1, 1 + n % 28),
                 "inner": {"a": n, "b": None} if n % 2 else {"a": None, "b": [{"c": None, "d": n}]},
                 "none": None} for n in range(values)]  # fmt: skip
        expected = [
            row | {"raw": ["a", {"bytes": 1}][n % 2], "day": str(row["day"]),
                   "inner": {"a": n} if n % 2 else {"b": [{"d": n}]}}
            for n, row in enumerate(rows)
        ]  # fmt: skip
        path, table = tmp_path / "a", pa.Table.from_pylist(rows or [{"text": "a"}])
        table = table.slice(0, values)
        if kind == "Parquet":
            files.write_table(table, path)
        else:
            new = pa.ipc.new_file if kind == "Arrow" else pa.ipc.new_stream
            with pa.OSFile(str(path), "wb") as file, new(file, table.schema) as out:
                out.write_table(table, max_chunksize=170)
        calls = list[Any]()
        for owner, name in ((pa, "set_cpu_count"), (pa, "set_io_thread_count"),
                            (resource, "setrlimit")):  # fmt: skip
            monkeypatch.setattr(owner, name, lambda *given: calls.append(given))
        opened = files.ParquetFile

        class Seen:
            def __init__(self, path: str, **options: Any) -> None:
                calls.append(options)
                self.file = opened(path, **options)
                self.metadata = self.file.metadata

            def iter_batches(self, **options: Any) -> Any:
                calls.append(options)
                for batch in self.file.iter_batches(**options):
                    assert batch.num_rows <= 100
                    yield batch

        monkeypatch.setattr(files, "ParquetFile", Seen)
        monkeypatch.setattr(
            sys, "argv", ["", str(path), "Parquet" if kind == "Parquet" else "Arrow"]
        )
        table_process.main()
        first, *lines = map(json.loads, capsys.readouterr().out.splitlines())
        assert first == [values if kind == "Parquet" else 0, ""]
        assert lines == expected
        (what, (soft, hard)), *others = calls
        assert what == resource.RLIMIT_AS
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        assert soft == hard
        used = pages * resource.getpagesize()
        assert soft - 2**30 == pytest.approx(used, rel=0.2)  # it changes between the readings
        assert others[:2] == [(1,), (1,)]
        if kind == "Parquet":
            assert others[2:] == [{"buffer_size": 2**16, "pre_buffer": False},
                                  {"batch_size": 100, "use_threads": False}]  # fmt: skip
        for error, said in ((MemoryError(), "a batch of rows needs more than 1 GiB of memory"),
                            (ValueError("a \n" * 999), " ".join(["a"] * 999)[:300]),
                            (KeyError(), "KeyError"), (BrokenPipeError(), "")):  # fmt: skip

            def fails(*given: Any, error: Exception = error) -> str:
                raise error

            monkeypatch.setattr(table_process, "write", fails)
            table_process.main()
            last = capsys.readouterr().out
            assert (json.loads(last) if said else last) == ([0, said] if said else "")

    @pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
    def test_what_a_table_holds_that_no_row_does(self, suffix: str, tmp_path: Path) -> None:
        """Two columns of a name, of which one would be left out, and bytes in place of text."""
        pa = pytest.importorskip("pyarrow", reason="needs the extra `data`")
        from pyarrow import parquet

        for names, value, said in (
            (["text", "text"], "a", "cannot be read: 2 columns have the name text; copy"),
            (["text", "id"], b"\xff\xfe", ':1: text is {"bytes": 2}, not text; write'),
        ):
            table = pa.Table.from_arrays([pa.array([value] * 9), pa.array(range(9))], names)
            path = tmp_path / f"a{suffix}"
            if suffix == ".parquet":
                parquet.write_table(table, path)
            else:
                with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as out:
                    out.write_table(table)
            assert said in refusal(path)

    def test_standard_input(self, tmp_path: Path) -> None:
        settings = ("--steps", 2, "--layers", 1, "--hidden", 32, "--vocabulary", 300, "--out")
        result = run("finetune", "--data", "-", *settings, tmp_path / "run", given=LINES)
        assert result.exit_code == 0, result.output
        assert "standard input: 30 rows with question/answer" in result.stderr
        again = run("finetune", "--data", "-", *settings, tmp_path / "run", given=LINES)
        assert "is finished" in again.output

    def test_missing_files(self, tmp_path: Path) -> None:
        assert "No such file" in refusal(tmp_path / "a.jsonl")
        for name in ("there-is-no/rows.jsonl", "there-is-no/rows.jsonl.gz"):
            assert refusal(Path(name)) == f"{name}: No such file or directory; pass a readable file"
        assert "hf download tatsu-lab/alpaca --repo-type dataset --loc" in refusal(
            "tatsu-lab/alpaca"
        )
        assert "pass at least one" in refusal([])


class TestFolders:
    def test_the_train_split_of_a_folder(self, tmp_path: Path) -> None:
        inside = tmp_path / "data"
        inside.mkdir()
        for name in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"):
            rows = [{"text": f"{name} {i}"} for i in range(9)]
            written(inside, *rows, name=f"{name}.jsonl")
        (tmp_path / "README.md").write_text("# About it")
        (inside / "notes.txt").write_text("not a row")
        data = read_data(tmp_path)
        assert isinstance(data, Records)
        assert {content[2][:5] for content in contents(data)} == {"train"}
        assert len(data.train) + len(data.held_out) == 18
        assert "reading 2 files; skipping data/notes.txt, data/test-00000-of-00001" in data.note
        assert data.name == tmp_path.name
        (inside / "train-00000-of-00002.jsonl").unlink()
        (inside / "train-00001-of-00002.jsonl").unlink()
        written(inside, *ROWS, name="more.jsonl")
        assert "holds splits but none called train" in refusal(tmp_path)

    def test_a_folder_of_texts_has_one_in_each_file(self, tmp_path: Path) -> None:
        for i in range(12):
            (tmp_path / f"{i}.md").write_text(f"# Page {i}\n\nIts words, {i}.\n")
        data = read_data(tmp_path)
        assert sorted(content[2] for content in contents(data)) == sorted(
            f"# Page {i}\n\nIts words, {i}.\n" for i in range(12)
        )

    def test_what_datasets_saves(self, tmp_path: Path) -> None:
        """As the package writes it: streams of Arrow, and a file that names them."""
        pa = pytest.importorskip("pyarrow", reason="needs the extra `data`")
        calls = [{"function": {"name": "f", "arguments": {each: 1}}} for each in "xy"]
        said = [SAY, *({"role": "assistant", "content": None, "tool_calls": [c]} for c in calls)]
        chats = [{"messages": [ASK | {"content": f"{i}"}, said[i % 3]]} for i in range(21)]
        table = pa.Table.from_pylist(chats)
        for split in ("train", "test"):
            folder = tmp_path / split
            folder.mkdir()
            with pa.ipc.new_stream(folder / "data-00000-of-00001.arrow", table.schema) as stream:
                stream.write_table(table, max_chunksize=7)
            state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}
            (folder / "state.json").write_text(json.dumps(state))
        (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
        data = read_data(tmp_path)
        assert isinstance(data, Records)
        assert contents(read_data(tmp_path / "train")) == contents(data)
        actual = [content[0][1] for content in contents(data)]
        assert sorted(actual, key=repr) == sorted(said * 7, key=repr), "absent is not null"
        assert "reading split train; skipping test" in data.note
        (tmp_path / "train" / "state.json").write_text('{"_data_files": [{"filename": "../x"}]}')
        assert "names '../x'" in refusal(tmp_path)

    def test_weights(self, tmp_path: Path) -> None:
        some = written(tmp_path, *({"text": f"a {i}"} for i in range(40)), name="a.jsonl")
        more = written(tmp_path, *({"text": f"b {i}"} for i in range(400)), name="b.jsonl")
        data = read_data([f"{some}:2", (more, 0.5)])
        assert isinstance(data, Records)
        trained = [record.answer for record in data.train]
        a, b = (sum(text[0] == letter for text in trained) for letter in "ab")
        held = {record.answer for record in data.held_out}
        assert a == 2 * (40 - sum(text[0] == "a" for text in held))
        assert 140 < b < 230
        assert len({*trained}) < len(trained)
        assert not held & {*trained}
        assert len(held) == len(data.held_out) == 44
        again = read_data([f"{some}:2", (more, 0.5)])
        assert (again.digest, [*again.train]) == (data.digest, [*data.train])
        assert read_data([f"{some}:3", (more, 0.5)]).digest != data.digest
        line = next(record.line for record in data.train if record.answer == "b 3")
        assert data.place(line) == f"{more}:4"
        assert data.where == f"{some} and 1 more"
        for weight in ("0", "-1", "nan", "1e9"):
            assert "; pass a number above 0" in refusal(f"{some}:{weight}")
        (tmp_path / "c.jsonl:2").write_text(some.read_text())
        assert len(read_data(str(tmp_path / "c.jsonl:2")).train) == 36, "it is the name of a file"

    def test_the_command_takes_several_files(self, tmp_path: Path) -> None:
        some = written(tmp_path, *({"text": f"a {i}"} for i in range(9)), name="a.jsonl")
        more = written(tmp_path, *({"text": f"b {i}"} for i in range(9)), name="b.jsonl")
        rest = ("--steps", 1, "--layers", 1, "--hidden", 32, "--vocabulary", 300, "--out")
        for number, words in enumerate(
            (("--data", f"{some}:2", more), ("--data", some, "--text", more, "--batch", 2))
        ):
            result = run("finetune", *words, *rest, tmp_path / f"{number}")
            assert result.exit_code == 0, result.output
            assert f"{some} and 1 more: 18 rows with text" in result.stderr


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}


class TestForms:
    @pytest.mark.parametrize(
        ("row", "expected"),
        [
            ({"instruction": "a", "input": "", "output": "b"}, [ASK, SAY]),
            ({"Instruction": "a", "Context": "c", "Response": "b"},
             [ASK | {"content": "a\n\nc"}, SAY]),
            ({"prompt": "a", "context": "c", "response": "b"}, [ASK | {"content": "a\n\nc"}, SAY]),
            ({"instruction": "a", "input": "c", "completion": "b"},
             [ASK | {"content": "a\n\nc"}, SAY]),
            ({"instruction": "a", "output": "b", "system": "s", "history": [["x", "y"]]},
             [{"role": "system", "content": "s"}, ASK | {"content": "x"}, SAY | {"content": "y"},
              ASK, SAY]),
            ({"question": "a", "answer": "b"}, [ASK, SAY]),
            ({"query": "a", "answer": "b"}, [ASK, SAY]),
            ({"prompt": "a", "response": "b"}, [ASK, SAY]),
            ({"instruction": "a", "response": "b"}, [ASK, SAY]),
            ({"input": "a", "output": "b"}, [ASK, SAY]),
            ({"problem": "a", "solution": "b", "answer": "c"}, [ASK, SAY]),
            ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
             [ASK, SAY]),
            ({"conversations": [ASK, SAY], "system": "s"},
             [{"role": "system", "content": "s"}, ASK, SAY]),
            ({"messages": [{"role": "developer", "content": "s"}, ASK, SAY | {"name": "Eve"}]},
             [{"role": "system", "content": "s"}, ASK, SAY | {"name": "Eve"}]),
            ({"messages": [ASK | {"content": [{"type": "text", "text": "a"},
                                              {"type": "text", "text": "!"}]}, SAY]},
             [ASK | {"content": "a!"}, SAY]),
            ({"messages": [ASK, SAY | {"reasoning_content": "hm", "weight": 0}, ASK, SAY]},
             [ASK, SAY | {"reasoning_content": "hm", "weight": 0}, ASK, SAY]),
            ({"messages": [ASK, SAY | {"train": False}, ASK, SAY | {"train": True}]},
             [ASK, SAY | {"weight": 0}, ASK, SAY | {"weight": 1}]),
            ({"messages": [ASK, {"role": "assistant", "tool_calls": [CALL]},
                           {"role": "tool", "content": "2", "tool_call_id": "x"}, SAY]},
             [ASK, CALLED, {"role": "tool", "content": "2", "tool_call_id": "x"}, SAY]),
            ({"messages": [ASK, {"role": "assistant", "content": None,
                                 "function_call": CALL["function"]},
                           {"role": "function", "name": "add", "content": "2"}, SAY]},
             [ASK, CALLED, {"role": "tool", "content": "2", "name": "add"}, SAY]),
            ({"conversations": [
                {"from": "human", "value": "a"},
                {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
                {"from": "observation", "value": "2"}, {"from": "gpt", "value": "b"}]},
             [ASK, CALLED, {"role": "tool", "content": "2"}, SAY]),
            *(({"messages": [ASK, SAY | {name: value}, ASK, SAY | {"images": []}]},
               [ASK, SAY | {"weight": int(value)}, ASK, SAY | {"images": []}])
              for name in LEARNED for value in (False, 0, 1.0)),
            *(({"messages": [ASK, {"role": "assistant", "content": content, name: "hm"}]},
               [ASK, {"role": "assistant", "content": content or "", name: "hm"}])
              for content in (None, "") for name in REASONING),
            ({"messages": [ASK, {"role": "assistant", "thinking": "hm"}]},
             [ASK, {"role": "assistant", "content": "", "thinking": "hm"}]),
            ({"conversations": [{"from": "human", "value": "a"},
                                {"from": "gpt", "value": "", "weight": 0}, ASK, SAY]},
             [ASK, {"role": "assistant", "content": "", "weight": 0}, ASK, SAY]),
            ({"messages": [ASK, {"role": "assistant", "content": None, "train": False}, ASK, SAY]},
             [ASK, {"role": "assistant", "content": "", "weight": 0}, ASK, SAY]),
            ({"prompt": [ASK, SAY, ASK], "completion": [SAY]},
             [ASK, SAY | {"weight": 0}, ASK, SAY]),
        ],
    )  # fmt: skip
    def test_chats(self, row: dict[str, Any], expected: list[Any], tmp_path: Path) -> None:
        actual = one(tmp_path, row)
        assert actual[1:6] == (expected, "", "", None, None)

    def test_texts(self, tmp_path: Path) -> None:
        assert one(tmp_path, {"text": "a"})[1:4] == ([], "", "a")
        assert one(tmp_path, {"content": "a", "url": "x"})[1:4] == ([], "", "a")
        assert one(tmp_path, {"prompt": "a", "completion": " b"})[1:4] == ([], "a", " b")
        assert one(tmp_path, {"text": None, "messages": [ASK, SAY]})[1] == [ASK, SAY]

    @pytest.mark.parametrize("tools", [[CALL], json.dumps([CALL])])
    def test_tools_and_options_of_the_template(self, tools: Any, tmp_path: Path) -> None:
        options = {"enable_thinking": False}
        row = {"messages": [ASK, SAY], "tools": tools, "chat_template_kwargs": options}
        assert one(tmp_path, row)[4:6] == ([CALL], options)
        assert one(tmp_path, {"messages": [ASK, SAY], "tools": []})[4:6] == (None, None)
        old = one(tmp_path, {"messages": [ASK, SAY], "functions": [CALL["function"]]})
        assert old.tools == [{"type": "function", "function": CALL["function"]}]

    @pytest.mark.parametrize(
        ("row", "said"),
        [
            ({"prompt": "a", "chosen": "b", "rejected": "c"},
             "preference pairs (prompt, chosen, rejected)"),
            ({"chosen": [ASK, SAY], "rejected": [ASK, SAY]}, "preference pairs (chosen, rejected)"),
            ({"prompt": "a", "completion": "b", "label": False},
             "unpaired preferences (prompt, completion, label)"),
            ({"messages": [ASK, SAY], "label": True}, "unpaired preferences (messages, label)"),
            ({"prompt": "a"}, "has prompt but no completion; add completion, or choose the m"),
            ({"prompt": [ASK], "answer": "2"}, "prompts with an answer for rewards (prompt, a"),
            ({"prompt": "a", "ground_truth": "2"}, "prompts with an answer for rewards"),
            ({"prompt": "a", "completions": ["b"], "labels": [True]}, "several answers"),
            ({"text": "a", "score": 0.5}, "scored texts (text, score)"),
            ({"prompt": "a", "completion": "b", "reward": 1}, "scored texts"),
            ({"text": "a", "label": 0}, "labels for classification (text, label)"),
            ({"sentence": "a", "labels": [0]}, "labels for classification (labels)"),
            ({"anchor": "a", "positive": "b"}, "pairs for embedding (anchor, positive)"),
            ({"sentence1": "a", "sentence2": "b"}, "pairs for embedding"),
            ({"query": "a", "positive": "b", "negative": "c"}, "pairs for embedding"),
            ({"messages": [ASK, SAY], "weight": 0.5}, "weighted rows (messages, weight)"),
            ({"messages": [ASK, SAY], "images": ["x.png"]}, "images or audio (messages, images)"),
            ({"input_ids": [1, 2], "labels": [1, 2]}, "tokens (input_ids, labels)"),
        ],
    )  # fmt: skip
    def test_rows_of_other_methods_are_refused_by_name(
        self, row: dict[str, Any], said: str, tmp_path: Path
    ) -> None:
        path = written(tmp_path, row, row)
        message = refusal(path)
        assert message.startswith(f"{path}:1: ")
        assert said in message
        assert "; " in message, "it names a cure"

    def test_a_column_may_be_left_out(self, tmp_path: Path) -> None:
        rows = [{"text": f"a {i}", "score": i} for i in range(9)]
        path = written(tmp_path, *rows)
        assert "skip the column with ignore=score" in refusal(path)
        shown = run("data", path)
        assert_one_clear_error(shown, "skip the column with --ignore score")
        data = read_data(path, ignore=["score"])
        assert isinstance(data, Records)
        assert data.note == f"{path}: 9 rows with text"
        other = read_data(path, ignore=["id", "score", "Score"])
        assert isinstance(other, Records)
        assert (
            other.note == f"{path}: 9 rows with text; no row has the columns to ignore: Score, id"
        )
        assert run("data", path, "--ignore", "score").exit_code == 0
        assert "one running text" in refusal(_text(tmp_path), ignore=["score"])

    def test_absent_values_change_nothing(self, tmp_path: Path) -> None:
        """A table gives each row all columns."""
        rows = [{"text": f"a {i}", "label": None, "images": []} for i in range(9)]
        data = read_data(written(tmp_path, *rows))
        assert data.note.endswith("9 rows with text; unused columns: label, images")

    def test_rows_that_are_not_good_are_never_learned(self, tmp_path: Path) -> None:
        rows = [{"prompt": f"{i}", "completion": " bad", "label": i % 2 == 0} for i in range(20)]
        path = tmp_path / "kto.csv"
        path.write_bytes(table(rows))
        assert "kto.csv:2: holds unpaired preferences" in refusal(path)
        result = run("finetune", "--text", path, "--out", tmp_path / "run", "--steps", 1)
        assert_one_clear_error(result, "kto.csv:2: holds unpaired preferences")

    def test_a_table_is_not_learned_with_its_commas(self, tmp_path: Path) -> None:
        rows = [{"prompt": f"what, {i}", "completion": f" that, {i}"} for i in range(20)]
        path = tmp_path / "a.csv"
        path.write_bytes(table(rows))
        report = inspect_data(path)
        shown = [[*map(tuple, each.pieces)] for each in report.examples]
        lines = [int(each.where.rpartition(":")[2]) - 2 for each in report.examples]
        assert shown == [[(f"what, {i}", False), (f" that, {i}", True)] for i in lines]

    @pytest.mark.parametrize(
        ("row", "said"),
        [
            ({"messages": [ASK | {"content": [{"type": "image_url", "image_url": "x"}]}, SAY]},
             "messages[0].content[0] has the type image_url, and only text is supported; re"),
            ({"messages": [ASK, SAY | {"weight": 0.5}]}, "messages[1].weight is 0.5; write 1"),
            ({"messages": [ASK, SAY | {"loss": 0.5}]}, "messages[1].loss is 0.5; write 1 (train"),
            ({"messages": [ASK, SAY | {"train": "no"}]}, 'messages[1].train is "no"; write 1'),
            ({"messages": [ASK, SAY | {"train": True, "weight": 0}]},
             "messages[1] has weight and train, which differ; keep one of them"),
            ({"messages": [ASK | {"images": ["x"]}, SAY]}, "messages[0] has images, and only text"),
            ({"messages": [ASK, SAY | {"train_detail": [{"train": False}]}]},
             "messages[1] has train_detail, but an answer has one weight; use weight, 0 or 1"),
            ({"messages": [ASK, SAY | {"weight": "0"}]}, 'messages[1].weight is "0"; write 1'),
            *(({"messages": [ASK, SAY | {name: value}]},
               f"messages[1] has {name}, which is unknown; write it as weight, 0 or 1")
              for name in ("is_trained", "lossMask", "mask", "ignore", "skip", "token_weights")
              for value in (0, True, [0, 1], "false", 0.5)),
            ({"role": "assistant", "content": "a"}, "holds messages of a chat (content, role)"),
            ({"messages": str([ASK, SAY])}, "[{'role': 'user', 'content': 'a'}, {'rol... is"
             " in Python syntax, not JSON; write them as JSON"),
            ([ASK, SAY], 'is [{"role": "user", "content": "a"}, {"rol..., not an object; write a'
             ' chat as {"messages": [...]}'),
            ([{"text": "a"}], 'is [{"text": "a"}], not an object; rename a file that is one list'
             " of rows to end in .json"),
            (["a", "b"], 'is ["a", "b"], not an object; write {"text": "..."} or'),
            ({"messages": [ASK, SAY | {"content": "", "weight": 1}]},
             "messages[1].content is empty; write a text"),
            *(({"messages": [ASK, SAY | {"content": "", name: " "}]},
               "messages[1].content is empty") for name in REASONING),
            *(({"messages": [ASK, SAY | {name: ["hm"]}]},
               f"messages[1].{name} is [\"hm\"], not text") for name in REASONING),
            ({"messages": [ASK | {"content": None, "thinking": "hm"}, SAY]},
             "messages[0].content is null, not text"),
            ({"messages": [ASK, {"role": "assistant", "content": None, "refusal": "No."}]},
             "messages[1].content is null, not text"),
            ({"messages": [ASK, SAY], "chat_template_kwargs": {"tools": []}},
             "chat_template_kwargs holds tools, which the library sets; leave it out"),
            ({"messages": [ASK, SAY | {"tool_calls": [{"function": {}}]}]},
             "messages[1].tool_calls[0] is {"),
            ({"messages": [ASK, SAY], "tools": [{"a": json.loads("[" * 90 + "]" * 90)}]},
             "tools is nested more than 64 times; write it flat"),
            ({"messages": [ASK, SAY | {"x": json.loads("[" * 90 + "]" * 90)}]},
             "messages[1] is nested more than 64 times"),
            ({"messages": [ASK, SAY | {"x": ["\ud800"]}]}, "messages[1] holds half a character"),
            ({"messages": [ASK, SAY | {"tool_calls": "x"}]}, "messages[1].tool_calls is x; write"),
            ({"messages": [ASK, SAY], "tools": "x"}, "tools is x; write it as [{"),
            ({"messages": [ASK, SAY], "chat_template_kwargs": 3}, "chat_template_kwargs is 3"),
            ({"conversations": [{"from": "function_call", "value": "x"}]},
             "conversations[0].value is x, not a call in JSON; wr"),
            ({"conversations": [{"from": "bot", "value": "x"}]},
             "conversations[0] has the role bot; choose from system"),
            ({"conversations": [{"value": "x"}]}, "conversations[0] has no role"),
            ({"prompt": [ASK], "completion": "b"}, "prompt is a list of messages, completion is"),
            ({"prompt": "a", "completion": "b", "system": "s"}, "has system beside prompt and"),
            ({"question": "a", "answer": 3}, "answer is 3, not text; write answer as a string"),
            ({"instruction": "a", "output": "b", "history": [["x"]]}, 'history is [["x"]]; write'),
        ],
    )  # fmt: skip
    def test_a_wrong_value_is_named_with_its_column(
        self, row: dict[str, Any], said: str, tmp_path: Path
    ) -> None:
        path = written(tmp_path, {"text": "fine"}, row)
        message = refusal(path)
        assert message.startswith(f"{path}:2: {said}")


def _text(tmp_path: Path) -> Path:
    path = tmp_path / "a.txt"
    path.write_text("words and words\n\n" * 20)
    return path


class TestBounds:
    def test_an_error_of_the_first_lines_comes_at_once(self, tmp_path: Path) -> None:
        path = tmp_path / "a.jsonl"
        with path.open("w") as file:
            file.write(LINES + '\n{"text": 3}\n')
            for _ in range(300):
                file.write((LINES + "\n") * 30)
        began = time.monotonic()
        assert ":31: text is 3" in refusal(path)
        assert time.monotonic() - began < 2  # the promise

    def test_an_error_at_the_beginning_of_another_file(self, tmp_path: Path) -> None:
        some = tmp_path / "a.jsonl"
        some.write_text((LINES + "\n") * 2000 + "no JSON")
        more = written(tmp_path, {"text": "a"}, {"text": 3}, name="b.jsonl")
        assert refusal([some, more]).startswith(f"{more}:2: ")

    @pytest.mark.parametrize("row", [2, 99, 100, 101])
    def test_the_first_rows_of_each_file_are_read_first(self, row: int, tmp_path: Path) -> None:
        some = written(tmp_path, *ROWS, {"text": 3}, name="a.jsonl")
        more = written(tmp_path, *[{"text": "a"}] * (row - 1), {"text": 3}, name="b.jsonl")
        first = f"{more}:{row}: " if row <= 100 else f"{some}:{len(ROWS) + 1}: "
        assert refusal([some, more]).startswith(first)

    def test_many_columns_are_not_all_remembered(self, tmp_path: Path) -> None:
        rows = [{"text": f"{n}", f"c{n}": n} for n in range(1100)]
        data = read_data(written(tmp_path, *rows))
        assert data.note.endswith("; unused columns: c0, c1, c2, c3, c4, c5, c6, c7, c8, c9, c10,"
                                  " c11 and 988 more")  # fmt: skip

    def test_the_bound_of_a_packed_file(self, tmp_path: Path) -> None:
        """1 GiB, or a hundred times its size."""
        path = tmp_path / "a"
        for size in (0, 2**23, 2**24):
            with path.open("wb") as file:
                file.truncate(size)
            assert data_files.bound(path) == max(2**30, 100 * size)

    def test_packed_files_grow_within_bounds(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("unsloth_cupy.finetune.data.data_files.UNPACKED", 2**21)
        line = json.dumps({"text": "a" * 9000}).encode() + b"\n"
        for suffix in (".gz", ".zst", ".bz2"):
            path = tmp_path / f"a.jsonl{suffix}"
            path.write_bytes(packed(line * 500, suffix))
            assert f"{path} expands to more than" in refusal(path)
            path.write_bytes(packed(b"a" * 2**22, suffix))
            assert f"{path}:1: has more than 1 MiB" in refusal(path)

    @pytest.mark.parametrize("name", ["jsonl", "json", "csv", "tsv", "parquet", "jsonl.zst"])
    def test_short_rows_of_a_packed_file_count_what_they_take(
        self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A record has fields and a place in several lists, however short its text is."""
        rows = [{"text": "a", "b": 0}] * 5000
        kind, _, packing = name.partition(".")
        data = {
            "json": lambda: json.dumps(rows).encode(),
            "csv": lambda: table(rows),
            "tsv": lambda: table(rows, "\t"),
            "parquet": lambda: parquet(rows, tmp_path / "plain"),
        }.get(kind, lambda: b'{"text": "a"}\n' * 5000)()
        path = tmp_path / f"a.{kind}.{packing or 'gz'}"
        path.write_bytes(packed(data, path.suffix))
        monkeypatch.setattr("unsloth_cupy.finetune.data.data_files.RATIO", 1)
        monkeypatch.setattr("unsloth_cupy.finetune.data.data_files.UNPACKED", 2**20)
        assert f"{path} expands to more than" in refusal(path)
        monkeypatch.setattr("unsloth_cupy.finetune.data.data_files.UNPACKED", 2**21)
        with suppress(ConfigError):  # all rows are equal: none is left to learn
            read_data(path)

    def test_records_in_memory_count_their_objects(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Within a factor of 3, be they few words in many objects or one long text."""
        for row in ({"text": "a"}, {"text": "a" * 10000}, {"messages": [ASK, SAY]},
                    {"messages": [ASK, SAY] * 20}, {"messages": [ASK, SAY], "tools": [CALL] * 9},
                    {"prompt": "a", "completion": "b"}):  # fmt: skip
            lines, collected = [json.dumps(row)] * 50, records._Collected()
            tracemalloc.start()
            for number, line in enumerate(lines):
                collected.append(Record(number, *content_of(json.loads(line))[1:]))
            size, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert size / 3 < collected.waiting < size * 3

    @pytest.mark.parametrize("sizes", [(0,), (3,), (5000,), (1, 2), (9, 0, 4000)])
    def test_a_frame_of_zstandard_is_skipped(self, sizes: tuple[int, ...], tmp_path: Path) -> None:
        """Before, between and behind frames that hold the text."""
        path, plain = tmp_path / "a.jsonl.zst", tmp_path / "a.jsonl"
        skipped = b"".join(
            struct.pack("<II", 0x184D2A50 + 7 * number, size) + b"x" * size
            for number, size in enumerate(sizes)
        )
        half = len(LINES) // 2
        parts = [packed(part.encode(), ".zst") for part in (LINES[:half], LINES[half:])]
        path.write_bytes(skipped + parts[0] + skipped + parts[1] + skipped)
        plain.write_text(LINES)
        assert contents(read_data(path)) == contents(read_data(plain))
        if sizes[-1]:
            path.write_bytes(path.read_bytes()[:-1])
            assert refusal(path).startswith(f"{path} is truncated or broken")

    def test_a_parquet_file_grows_within_bounds(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("unsloth_cupy.finetune.data.data_files.UNPACKED", 2**20)
        path = tmp_path / "a.parquet"
        parquet([{"text": "a" * 2000}] * 2000, path)
        assert f"{path} expands to more than" in refusal(path)
        parquet([{"text": "a"}, {"text": "b" * 2**21}], path)
        assert f"{path}:2: has more than 1 MiB" in refusal(path)
        parquet([{"text": "a"}], path)
        path.write_bytes(path.read_bytes()[:-20] + b"x" * 16 + b"PAR1")
        assert f"{path} cannot be read: " in refusal(path)

    @pytest.mark.skipif(sys.platform != "linux", reason="needs a system that limits memory")
    def test_what_reads_parquet_has_a_limit_of_memory(self, tmp_path: Path) -> None:
        from unsloth_cupy.finetune.data import table_process

        path = tmp_path / "a.parquet"
        parquet([{"text": "a" * 2**26}] * 3, path, compression="zstd")
        assert path.stat().st_size < 2**16
        program = table_process.__file__
        text = Path(program).read_text().replace("MEMORY = 1 << 30", "MEMORY = 1 << 26")
        (tmp_path / "small.py").write_text(text)
        done = subprocess.run(
            [sys.executable, tmp_path / "small.py", path, "Parquet"],
            capture_output=True, check=True, env=os.environ | {"MALLOC_ARENA_MAX": "1"},
        )  # fmt: skip
        assert b"needs more than" in done.stdout.splitlines()[-1]
        assert len(done.stdout) < 1000

    def test_many_records_wait_in_a_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rows = [{"messages": [ASK | {"content": f"{i}"}, SAY], "tools": [CALL]} for i in range(50)]
        path = written(tmp_path, *rows, *({"text": f"{i}"} for i in range(50)))
        expected = read_data(path)
        monkeypatch.setattr(records, "IN_MEMORY", 3000)
        monkeypatch.setattr(records, "SMALL", 1000)
        actual = read_data(path)
        assert isinstance(actual.train, Stored)
        assert [*actual.train] == expected.train
        assert [*actual.held_out] == expected.held_out
        assert [*actual.train[3:5]] == expected.train[3:5]
        assert [*actual.blocks()] == [*expected.blocks()]
        kept = actual.train.kept.path
        assert kept.exists()
        del actual
        assert not kept.exists()


class TestWords:
    """What values are in messages, and which names and texts are known."""

    def test_long_lists_and_values_are_cut(self) -> None:
        for count in (0, 1, 12, 13, 40):
            names = [f"c{n}" for n in range(count)]
            expected = ", ".join(names[:12]) + f" and {count - 12} more" * (count > 12)
            assert (forms.listed(names), labels.some(names)) == (expected, expected)
        for value, expected in (
            ("a" * 40, "a" * 40), ("a" * 41, "a" * 40 + "..."), (["é"], '["\\u00e9"]'),
            (None, "null"), (json.loads("[" * 900 + "]" * 900), "[" * 40 + "..."),
        ):  # fmt: skip
            assert messages.shown(value) == expected
        assert messages.shown(nested(10**5)) == "nested too deeply"

    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("System Prompt", "system_prompt"), (" Input ", "input"), ("a - b", "a_b"),
            ("A" * 40, "a" * 40), ("A" * 41, "A" * 41), ("a\t-b", "a_b"),
        ],
    )  # fmt: skip
    def test_names_of_columns(self, name: str, expected: str) -> None:
        assert forms.normal(name) == expected

    @pytest.mark.parametrize("names", [["text", "Text"], ["Text", "text"], ["TEXT", "Text"]])
    def test_of_two_spellings_the_usual_one_is_read(self, names: list[str]) -> None:
        """Else the first of the row."""
        row = {name: f"of {name}" for name in names}
        assert content_of(row).answer == row["text" if "text" in row else names[0]]

    def test_texts_are_whole_characters(self) -> None:
        for text in ("a", "é", "\U0001f680", " a "):
            assert messages.text_of(text, "x") is text
        assert messages.text_of(" ", "x", 0) == " "
        assert messages.text_of("a", "x", 1) == "a"
        for text in ("\ud800", "a\udfff", "é\udabc"):
            with pytest.raises(ConfigError, match="x holds half a character"):
                messages.text_of(text, "x")
        for least, text in ((1, " "), (1, ""), (2, "a"), (2, " a ")):
            with pytest.raises(ConfigError, match="x is empty; write a text"):
                messages.text_of(text, "x", least)

    @pytest.mark.parametrize("inner", ["list", "object", "both"])
    def test_values_may_be_nested_so_often(self, inner: str) -> None:
        for depth in (63, 64, 65, 66):
            value: Any = "a"
            for n in range(depth):
                is_list = inner == "list" or (inner == "both" and n % 2)
                value = [value] if is_list else {"k": value}
            if depth <= 64:
                messages.check_plain(value, "x")
                continue
            with pytest.raises(ConfigError, match="x is nested more than 64 times; write it flat"):
                messages.check_plain(value, "x")
        for value in ({"\ud800": 1}, {"a": [{"b": "\ud800"}]}, ["a", ["\ud800"]]):
            with pytest.raises(ConfigError, match="x holds half a character"):
                messages.check_plain(value, "x")

    @pytest.mark.parametrize(
        ("value", "expected"),
        [
            ("[1]", [1]), (' {"a": 1}', {"a": 1}), ("[1", "[1"), ("1", "1"), ("true", "true"),
            ("[ 'a' ]", "[ 'a' ]"), (3, 3), (None, None), ("", ""),
        ],
    )  # fmt: skip
    def test_cells_that_hold_json(self, value: Any, expected: Any) -> None:
        assert forms.parsed(value) == expected
        for role in ("role", "from", "content", "value"):
            with pytest.raises(ConfigError, match="is in Python syntax, not JSON; write them as"):
                forms.parsed(f" [ {{ '{role}': 'a'}}]")
        deep = "[" * 10**5
        assert forms.parsed(deep) == deep


class TestSplit:
    """Which records are held out, and how often the others are trained on."""

    def parts(self, texts: list[str], weights: Any, **options: Any) -> Any:
        collected = records._Collected()
        for line, text in enumerate(texts):
            collected.append(Record(line, [], "", text))
        *both, repeated = records._split("a.jsonl", collected, np.array(weights, float), **options)
        held = {texts[record.line] for record in both[1]}
        times = [n for n, w in zip(texts, weights, strict=True) if n in held and w >= 1]
        if all(weight >= 1 for weight in weights):
            assert repeated == len(times) - len(held)
        return [[record.line for record in part] for part in both]

    @pytest.mark.parametrize("share", [None, 0.1, 0.3, 0.01])
    def test_equal_records_are_on_one_side(self, share: float | None) -> None:
        draws = np.random.default_rng(0)
        for count in (2, 3, 9, 10, 19, 20, 300):
            texts = [f"{n}" for n in draws.integers(0, count, count)]
            texts[:2] = ["a", "b"]
            weights = draws.choice([0.5, 1, 1.5, 2, 3], count)
            weights[:2] = 1
            train, held = self.parts(texts, weights, share=share)
            assert held == sorted(held)
            inside = [texts[n] for n in held]
            assert len({*inside}) == len(inside) == max(1, int(len({*texts}) * (share or 0.1)))
            assert not {*inside} & {texts[n] for n in train}
            assert train == sorted(train)
            firsts = {text: texts.index(text) for text in texts}
            assert held == sorted(firsts[text] for text in inside)
            times = [train.count(n) for n in range(count)]
            for n, weight in enumerate(weights):
                least = 0 if texts[n] in inside else int(weight)
                assert times[n] - least in ((0, 1) if weight % 1 and least == int(weight) else (0,))
            assert [train, held] == self.parts(texts, weights, share=share)
        halves = [times[n] - int(w) for n, w in enumerate(weights)
                  if w % 1 and texts[n] not in inside]  # fmt: skip
        assert 0.3 < np.mean(halves) < 0.7

    def test_a_tenth_is_bounded_but_a_share_is_not(self, monkeypatch: pytest.MonkeyPatch) -> None:
        texts = [f"{n:02}" for n in range(90)]
        size = len(Record(0, [], "", "00").content())
        for most, characters, expected in (
            (90, 10**6, 9), (4, 10**6, 4), (1, 10**6, 1), (90, 3 * size, 4), (90, 3 * size - 1, 3),
            (90, 0, 1),
        ):  # fmt: skip
            monkeypatch.setattr(records, "HELD_OUT_CHARACTERS", characters)
            assert len(self.parts(texts, [1] * 90, most=most)[1]) == expected
            assert len(self.parts(texts, [1] * 90, most=most, share=0.5)[1]) == 45
        assert self.parts(texts, [1] * 90, whole=True) == [[*range(90)], []]
        assert self.parts(texts[:1], [1], whole=True) == [[0], []]

    @pytest.mark.parametrize(
        ("texts", "weights", "options", "said"),
        [
            ([], [], {}, "is empty; write two lines or more: one is held out"),
            (["a"], [1], {}, "holds one record; write two lines or more: one is held out"),
            ([], [], {"whole": True}, "is empty; add a line"),
            (["a", "a"], [1, 1], {}, "holds only equal lines; write lines that differ"),
            (["a", "b"], [1e-9, 1e-9], {},
             "holds no training line besides the evaluation lines; give more lines, or more w"),
        ],
    )  # fmt: skip
    def test_too_few_records(self, texts: Any, weights: Any, options: Any, said: str) -> None:
        with pytest.raises(ConfigError, match=f"a.jsonl {said}"):
            self.parts(texts, weights, **options)

    def test_another_share_keeps_records_and_their_weights(self, tmp_path: Path) -> None:
        rows = [{"text": f"a {n // 2}"} for n in range(40)]
        some = written(tmp_path, *rows, name="a.jsonl")
        more = written(tmp_path, *({"text": f"b {n}"} for n in range(30)), name="b.jsonl")
        before = read_data([f"{some}:3", more])
        for share, expected in ((0.2, 10), (0.5, 25), (0.02, 1)):
            actual = records.split(before, share)
            assert len(actual.held_out) == expected
            held = {record.answer for record in actual.held_out}
            times = Counter(record.line for record in actual.train)
            known = {record.line for record in before.held_out}
            for line in range(1, 71):
                text = f"a {(line - 1) // 2}" if line <= 40 else f"b {line - 41}"
                weight = 3 if line <= 40 and line not in known else 1
                assert times[line] == (0 if text in held else weight) or line <= 40
            assert actual.where == before.where
            lines = {record.line for record in (*actual.train, *actual.held_out)}
            assert actual.repeated == 70 - len(lines) > 0
            assert [*records.split(before, share).train] == [*actual.train]

    @pytest.mark.parametrize("memory", [10**9, 2000, 1])
    def test_records_are_the_same_in_a_file(
        self, memory: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """In memory up to a size; beyond it, in parts, in a file."""
        monkeypatch.setattr(records, "IN_MEMORY", memory)
        monkeypatch.setattr(records, "SMALL", memory // 2)
        every = [
            Record(n, [ASK, SAY] * (n % 3), "p" * n, "é" * n, [CALL] if n % 2 else None,
                   {"a": n} if n % 5 == 0 else None, "r", n > 20, n / 2)
            for n in range(50)
        ]  # fmt: skip
        collected = records._Collected()
        for record in every:
            collected.append(record)
            assert collected.waiting <= memory
        assert (collected.kept is not None) == (memory < 10**9)
        for chosen in ([0, 49, 7, 7], [], [3]):
            actual = collected.some(np.array(chosen, int))
            assert [*actual] == [every[n] for n in chosen]
            assert len(actual) == len(chosen)
            assert [*actual[1:3]] == [every[n] for n in chosen[1:3]]
            if chosen:
                assert actual[-1] == every[chosen[-1]]
        assert len(collected.digests) == 16 * 50
        assert [*collected.sizes] == [len(record.content()) for record in every]

    def test_blocks_hold_all_words_of_training(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(records, "RECORDS", 3)
        rows = [Record(n, [], f"ask {n}", f"tell {n}") for n in range(7)]
        rows += [Record(7, [ASK | {"content": "who"}, CALLED], "", "", [CALL])]
        for size, counts in ((2**20, [8]), (2**20 + 1, [3, 3, 2])):
            data = Records(None, "", "", size, rows, rows[:1])
            blocks = [text for text, _ in data.blocks()]
            assert [text for _, text in data.blocks()] == blocks
            assert [len(re.findall("tell|who", block)) for block in blocks] == counts
        for each in ("user", "who", "assistant", json.dumps([CALL])):
            assert blocks[-1].count(each) >= 1
        assert blocks[-1].count(json.dumps([CALL])) == 2
        assert "None" not in blocks[-1]
        assert "null" not in blocks[-1]

    def test_a_line_is_that_of_its_file(self) -> None:
        files = ((0, "a.jsonl", "a.jsonl:"), (5, "b.json", "b.json, object "), (9, "rows", "row "))
        other = Records(None, "", "", 0, [], [], ((0, "e.jsonl", "e.jsonl:"),))
        data = Records(Path("a"), "", "", 0, [], [], files, evaluated=other)
        for line, expected in ((1, "a.jsonl:1"), (5, "a.jsonl:5"), (6, "b.json, object 1"),
                               (9, "b.json, object 4"), (10, "row 1"), (99, "row 90"),
                               (-3, "e.jsonl:3")):  # fmt: skip
            assert data.place(line) == expected
        assert (data.where, other.where) == ("a.jsonl and 2 more", "e.jsonl")
        plain = data._replace(files=(), evaluated=None)
        assert (plain.place(3), plain.where) == ("a:3", "a")


class TestNames:
    """Files and folders by their names."""

    @pytest.mark.parametrize(
        ("names", "read"),
        [
            (["a.txt", "b.md"], ["a.txt", "b.md"]),
            (["a.txt", "b.jsonl"], ["b.jsonl"]),
            (["README.md", "b.txt"], ["b.txt"]),
            (["LICENSE.txt", "x/state.json", "config.json", "a.json"], ["a.json"]),
            ([".hidden.jsonl", "_x.jsonl", "a.jsonl", "_y/b.jsonl", ".z/c.jsonl"], ["a.jsonl"]),
            (["a.jsonl.gz", "b.JSONL", "c.gz", "d.bin", "e"], ["a.jsonl.gz", "b.JSONL"]),
            (["train.jsonl", "test.jsonl", "other.jsonl"], ["other.jsonl", "train.jsonl"]),
            (["train/a.jsonl", "val/a.jsonl", "dev-1.jsonl"], ["train/a.jsonl"]),
            (["x/train_1.jsonl", "train/test.jsonl", "train/b.jsonl"],
             ["train/b.jsonl", "x/train_1.jsonl"]),
            (["test.jsonl"], ["test.jsonl"]),
            (["valid-1.jsonl", "eval.jsonl"], ["eval.jsonl", "valid-1.jsonl"]),
            (["trainer.jsonl", "testing.jsonl"], ["testing.jsonl", "trainer.jsonl"]),
        ],
    )  # fmt: skip
    def test_files_of_a_folder(self, names: list[str], read: list[str], tmp_path: Path) -> None:
        folder = tmp_path / "data"
        for name in names:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            text = b'{"text": "a"}\n' if "json" in name.lower() else b"a"
            path.write_bytes(packed(text, ".gz") if name.endswith(".gz") else text)
        files, note = data_files.located(folder)
        assert [file.path.relative_to(folder).as_posix() for file in files] == read
        assert {(file.weight, file.keep) for file in files} == {(1.0, None)}
        known = data_files.KINDS.keys()
        skipped = sorted(
            name for name in names
            if name not in read and Path(name.lower()).suffix in known and "/." not in f"/{name}"
            and "/_" not in f"/{name}" and not data_files.ABOUT.match(Path(name).name)
        )  # fmt: skip
        expected = f"{folder}: reading {len(read)} files; skipping {', '.join(skipped)}"
        assert note == (expected if skipped else "")

    @pytest.mark.parametrize("kind", [*dict.fromkeys(data_files.KINDS.values()), ""])
    def test_only_a_text_may_hold_zeros(self, kind: str) -> None:
        for head in (b"a\0b", b"\0", b'{"text": "\0"}'):
            expected = {"text": "JSON lines" if head[:1] == b"{" else ""}.get(kind, "binary data")
            if kind in ("Parquet", "Arrow"):
                expected = "JSON lines" if head[:1] == b"{" else "text"
            assert found_content(head, kind) == expected

    def test_many_files_are_not_all_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for n in range(8):
            written(tmp_path, {"text": "a"}, name=f"{['train', 'test'][n > 1]}-{n}.jsonl")
        _, note = data_files.located(tmp_path)
        assert note.endswith("2 files; skipping test-2.jsonl, test-3.jsonl, test-4.jsonl,"
                             " test-5.jsonl, test-6.jsonl, ...")  # fmt: skip
        (tmp_path / "test-7.jsonl").unlink()
        assert data_files.located(tmp_path)[1].endswith("test-6.jsonl")
        monkeypatch.setattr(data_files, "MOST_FILES", 7)
        assert len(data_files.located(tmp_path)[0]) == 2
        monkeypatch.setattr(data_files, "MOST_FILES", 6)
        with pytest.raises(ConfigError, match="holds over 6 files; name the files to read"):
            data_files.located(tmp_path)
        for path in tmp_path.iterdir():
            path.unlink()
        with pytest.raises(ConfigError, match="Is a directory without training data; pass files w"):
            data_files.located(tmp_path)
        (tmp_path / "test.jsonl").touch()
        (tmp_path / "a.jsonl").touch()
        with pytest.raises(ConfigError, match="holds splits but none called train; name the files"):
            data_files.located(tmp_path)

    def test_a_weight_is_a_number_behind_a_path(self, tmp_path: Path) -> None:
        path = written(tmp_path, {"text": "a"})
        for word, weight in (("2", 2), ("0.5", 0.5), (".5", 0.5), ("1e2", 100), ("+3", 3),
                             ("1000", 1000)):  # fmt: skip
            ((file,), note) = data_files.located(f"{path}:{word}")
            assert (file.path, file.weight, file.name, note) == (path, weight, str(path), "")
            for data in ((path, weight), [(str(path), weight)]):
                assert data_files.located(data)[0][0].weight == weight
        several = data_files.located((path, f"{path}:2", path))[0]
        assert [file.weight for file in several] == [1, 2, 1]
        for wrong in (f"{path}:0", f"{path}:1000.1", f"{path}:-1", f"{path}:inf", f"{path}:NaN",
                      [(path, True)], [(path, "2")]):  # fmt: skip
            with pytest.raises(ConfigError, match=r"weight .*; pass a number above 0 and"):
                data_files.located(wrong)
        for wrong in (f"{path}:", f"{path}:two", ":2"):
            with pytest.raises(ConfigError, match="No such file"):
                data_files.located(wrong)

    def test_files_together_have_the_name_of_the_first(self, tmp_path: Path) -> None:
        paths = [written(tmp_path, {"text": "a"}, name=name) for name in ("a.b.jsonl", "c.jsonl")]
        (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}'))
        for data, expected in (
            (paths[:1], "a.b"), (paths, "a.b-and-1-more"),
            ([tmp_path / "d.jsonl.gz", *paths], "d-and-2-more"),
        ):  # fmt: skip
            assert data_files.name_of(data_files.located(data)[0]) == expected

    @pytest.mark.parametrize(
        ("names", "expected"),
        [(["train", "test"], "train"), (["test"], "test"), (["a", "b"], None), ([], None)],
    )
    def test_a_split_is_chosen(self, names: list[str], expected: str | None) -> None:
        if expected is not None:
            assert data_files.split_of(names, "x") == expected
            return
        with pytest.raises(ConfigError, match=f"x holds the splits {', '.join(names)}; name one"):
            data_files.split_of(names, "x")

    @pytest.mark.parametrize("packing", [".gz", ".bz2", ".zst"])
    def test_a_packed_file_has_a_size(
        self, packing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Unpacked: the bound in bytes, or a hundred times what it takes packed."""
        path = tmp_path / f"a.txt{packing}"
        for size, bound, ratio in ((5000, 5000, 1), (5000, 10, 5000)):
            path.write_bytes(packed(b"a" * size, packing))
            monkeypatch.setattr(data_files, "UNPACKED", bound)
            monkeypatch.setattr(data_files, "RATIO", ratio)
            (file,), _ = data_files.located(path)
            assert data_files.unpacked(file).path.read_bytes() == b"a" * size
            monkeypatch.setattr(data_files, "UNPACKED", bound - 1)
            monkeypatch.setattr(data_files, "RATIO", size // path.stat().st_size - 1)
            said = f"{path} expands to more than 0 GiB and more than {data_files.RATIO} times"
            with pytest.raises(ConfigError, match=re.escape(said)):
                data_files.unpacked(file)


class TestReport:
    def test_counts_and_lengths(self, tmp_path: Path) -> None:
        rows = [{"prompt": f"{i:02}", "completion": "x" * (i + 1)} for i in range(30)]
        path = written(tmp_path, *rows)
        report = inspect_data(path)
        data = read_data(path)
        expected = sorted(3 + int(record.prompt) for record in data.train)
        assert (report.train, report.held_out, report.unit) == (27, 3, "characters")
        assert report.lengths["least"] == expected[0]
        assert report.lengths["most"] == expected[-1]
        assert (report.total, report.learned) == (sum(expected), sum(expected) - 2 * 27)
        counts = [sum(low <= n <= high for n in expected) for low, high, _ in report.histogram]
        assert counts == [count for *_, count in report.histogram]
        assert sum(counts) == 27
        assert json.loads(run("data", path, "--json").stdout)["learned"] == report.learned

    def test_tokens_of_a_model(self, tmp_path: Path) -> None:
        folder = _model(tmp_path)
        rows = [{"messages": [ASK, SAY | {"content": f"the cat {i} \x1b[31m"}]} for i in range(20)]
        path = written(tmp_path, *rows)
        report = inspect_data(path, folder)
        assert report.unit == "tokens"
        for example in report.examples:
            learned = "".join(text for text, known in example.pieces if known)
            assert learned.startswith("the cat")
            assert "user" not in learned
        shown = run("data", path, "--model", folder)
        assert shown.exit_code == 0, shown.output
        assert "rows with messages" in shown.stdout
        assert "\x1b" not in shown.stdout
        assert "«the cat" in shown.stdout
        assert f"target tokens: {report.learned:,} of {report.total:,}" in shown.stdout

    @pytest.mark.parametrize("name", REASONING)
    def test_without_a_model_nothing_of_a_chat_is_left_out(self, name: str, tmp_path: Path) -> None:
        rows = [
            {"messages": [ASK | {"content": f"{i}"}, CALLED, {"role": "tool", "content": "2"},
                          {"role": "assistant", "content": None, name: "hm"}], "tools": [CALL]}
            for i in range(20)
        ]  # fmt: skip
        report = inspect_data(written(tmp_path, *rows))
        assert not report.left_out
        said = len(json.dumps([CALL])) + len("hm")
        assert [report.learned, report.lengths["most"]] == [18 * said, said + len("2") + 2]
        learned = "".join(text for text, known in report.examples[0].pieces if known)
        assert learned == (
            f"<tool_call>{json.dumps(CALL['function'])}</tool_call><|im_end|>\n"
            "<think>\nhm\n</think>\n<|im_end|>\n"
        )

    def test_each_text_of_a_chat_is_shown(self, tmp_path: Path) -> None:
        template = (
            "{% for m in messages %}<{{ m.role }}>{{ '!' if loop.last }}{{ m.content }}</s>"
            "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
        )
        folder = _model(tmp_path)
        (folder / "chat_template.jinja").write_text(template)
        rows = [{"messages": [ASK, SAY, ASK, SAY | {"content": f"{i}"}]} for i in range(20)]
        report = inspect_data(written(tmp_path, *rows), folder)
        for each in report.examples:
            learned = [text.strip() for text, known in each.pieces if known]
            assert len(learned) == 2
            assert learned[1] == "!b</s>"

    def test_texts_without_a_target_are_counted(self, tmp_path: Path) -> None:
        """Chats in which no reply has a weight, or the reply is cut by ``weight``."""
        quiet, more = SAY | {"weight": 0}, ASK | {"content": "and?"}
        rows = [{"messages": [ASK | {"content": f"{i}"}, quiet if i % 3 else SAY, more]
                 + [quiet] * (i % 2)} for i in range(30)]  # fmt: skip
        data = read_data(written(tmp_path, *rows))
        report = inspect_data(data)
        assert isinstance(data, Records)
        asked = [int(record.messages[0]["content"]) for record in data.train]
        assert (report.train, report.counted) == (len(asked), len(asked))
        assert report.unlearned == sum(i % 3 > 0 for i in asked) > 0

    def test_a_sample_of_many_rows_is_counted(self) -> None:
        """Equally far apart, each with its place and value; of a text, its first paragraphs."""
        train = [Record(n, [], "", f"text {n}", value=n or None) for n in range(1, 11)]
        train[0] = train[0]._replace(value=None)
        data = Records(None, "rows", "digest", 100, train, [])
        seen = list[Any]()
        listener = Listener()
        listener.reading = lambda what, size: nullcontext(  # type: ignore[method-assign]
            lambda count: seen.append((what, size, count))
        )
        for most, lines in ((None, [*range(1, 11)]), (3, [1, 5, 9]), (10, [*range(1, 11)]),
                            (9, [1, 3, 5, 7, 9]), (1, [1])):  # fmt: skip
            seen.clear()
            with hearing(listener):
                chosen = [*data_report._records(data, most)]
            assert [record.line for _, record in chosen] == lines
            places = [data.place(n) + (f", {n}" if n > 1 else "") for n in lines]
            assert [where for where, _ in chosen] == places
            assert seen == [("counting", 100, 100 // len(lines))] * len(lines)
        words = b"first\n\n \n\nsecond\n\nthird"
        text = Text("a", None, lambda: BytesIO(words), len(words), len(words), "", "digest", "")
        for most, numbers in ((None, [1, 3, 4]), (2, [1, 3])):
            each = [*data_report._records(text, most)]
            assert [record.line for _, record in each] == numbers
            assert [where for where, _ in each] == [f"a, paragraph {n}" for n in numbers]
            assert [record.answer for _, record in each] == ["first", "second", "third"][:most]

    def test_lengths_and_the_beginning_of_a_text(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Bins begin at powers of two; an example ends in the piece that is too long."""
        histogram = data_report._histogram(array("q", [0, 1, 2, 3, 4, 7, 8]))
        assert histogram == [(0, 1, 2), (2, 3, 2), (4, 7, 2), (8, 15, 1)]
        assert data_report._histogram(array("q", [5, 17])) == [(4, 7, 1), (8, 15, 0), (16, 31, 1)]
        monkeypatch.setattr(data_report, "LONGEST_EXAMPLE", 5)
        one, two, three = (Piece(text, text == "de") for text in ("abc", "de", "fg"))
        end = Piece(" ...", False)
        assert data_report._begin([one, two]) == [one, two]
        assert data_report._begin([one, three, three]) == [one, three, Piece("", False), end]
        assert data_report._begin([one, one]) == [one, Piece("ab", False), end]
        assert data_report._begin([Piece("abcdef", True)]) == [Piece("abcde", True), end]

    def test_all_numbers_of_a_report(self) -> None:
        weights = [1, 0, None]
        rows = [
            Record(n, [ASK, SAY | ({} if weight is None else {"weight": weight})], "", "")
            for n, weight in enumerate(weights, 1)
        ]
        rows.append(Record(4, [], "ask", "answer"))
        data = Records(None, "rows", "digest", 9, rows, rows[:1], note="noted", forms={"chat": 4})
        report = inspect_data(data, examples=2)
        asked, said = len(ASK["content"]), len(SAY["content"])
        assert report[:6] == ("noted", {"chat": 4}, 4, 1, "characters", 4)
        assert (report.learned, report.unlearned) == (2 * said + 6, 1)
        assert report.total == 3 * (asked + said) + 9
        assert {*report.lengths} == {"least", "median", "99 %", "most"}
        sizes = sorted([*[asked + said] * 3, 9])
        expected = [sizes[0], sizes[2], sizes[3], sizes[3]]
        assert [*report.lengths.values()] == expected
        assert len(report.examples) == 2
        for empty in (data._replace(train=[]), Text("a", None, BytesIO, 0, 0, "", "digest", "")):
            with pytest.raises(ConfigError, match="holds no text to train on"):
                inspect_data(empty)
        words = Text("a", None, lambda: BytesIO(b"one\n\nthree"), 10, 10, "", "digest", "")
        report = inspect_data(words)
        assert report[:6] == ("a: running text, all tokens are targets", {"text": 1}, 2, 0,
                              "characters", 2)  # fmt: skip

    def test_running_text(self, tmp_path: Path) -> None:
        report = inspect_data(_text(tmp_path))
        assert report.learned == report.total > 0
        assert report.examples[0].pieces == [("words and words", True)]


def _model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for source in (LLAMA / "config.json", GOLDEN / "tokenizer" / "tokenizer.json"):
        (folder / source.name).write_bytes(source.read_bytes())
    return folder


def test_a_trainer_takes_what_was_read(tmp_path: Path) -> None:
    path = written(tmp_path, *({"text": f"the cat {i}"} for i in range(30)))
    settings: dict[str, Any] = {"steps": 3, "layers": 1, "hidden": 32, "vocabulary": 300}
    losses = []
    for number, data in enumerate((path, read_data(path), [path])):
        made = Trainer(None, data, Settings(out=tmp_path / f"{number}", **settings)).train()
        losses.append([line.get("loss") for line in made.files.lines()])
    assert losses[0] == losses[1] == losses[2]
    with pytest.raises(ConfigError, match="give it to read_data"):
        Trainer(None, read_data(path), ignore=["id"])


def test_few_characters_are_held_out_of_many_long_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenth of 200 rows would be 20: one reaches the limit, and the next one is beyond it."""
    rows = [{"prompt": f"{i}", "completion": "x" * 90} for i in range(200)]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    every = read_data(path)
    assert len(every.held_out) == 20
    assert every.size == path.stat().st_size
    monkeypatch.setattr("unsloth_cupy.finetune.data.records.HELD_OUT_CHARACTERS", 150)
    assert len(read_data(path).held_out) == 2


def test_a_long_text_is_several_rows_of_whole_paragraphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unsloth_cupy.finetune.data.tables.LONGEST", 100)
    paragraphs = [f"{i} " + "word " * 7 for i in range(12)]
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("\n\n".join(paragraphs))
    data = read_data([tmp_path / "a.txt", tmp_path / "b.txt"])
    texts = [each.answer for part in (data.train, data.held_out) for each in part]
    assert max(map(len, texts)) <= 100
    assert min(text.count("word") % 7 for text in texts) == 0
    assert {text.split()[0] for text in "\n\n".join(texts).split("\n\n") if text.strip()} == {
        str(i) for i in range(12)
    }


def test_an_unknown_method_is_named() -> None:
    with pytest.raises(ConfigError, match=r"read_data: method='dp'; choose from sft"):
        read_data("rows.jsonl", method="dp")


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        (["prompt", "completion"], True), (["prompt", "label"], True), (["text", "label"], True),
        (["text", "id"], True), (["text", "other"], False), (["other", "id"], False),
        (["chosen", "rejected"], True), (["chosen", "other"], False), (["text"], False),
    ],
)  # fmt: skip
def test_the_first_line_of_a_table_is_a_header(cells: list[str], expected: bool) -> None:
    assert is_header(cells) is expected
