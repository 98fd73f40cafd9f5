"""Large texts: tokens as those of a whole text, in a file that is made once, in little memory."""

import contextlib
import io
import os
import random
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from unsloth_cupy import files
from unsloth_cupy.errors import ConfigError
from unsloth_cupy.finetune.data import text as texts
from unsloth_cupy.finetune.data import tokens
from unsloth_cupy.finetune.data.text import Batch, Batches, read_text
from unsloth_cupy.finetune.data.tokenizer import encode, train_tokenizer
from unsloth_cupy.finetune.data.tokens import StoredTokens, tokenised, tokens_of
from unsloth_cupy.finetune.listener import Listener, hearing
from unsloth_cupy.models import objective

from ..cli.test_cli import assert_one_clear_error, numbers, run, trained, weights
from ..harness.tracked import ROOT

WORDS = ["the", "cat's", "Grüße", "漢字", "👩‍👧", "1234567", "x+=y", "(said)", "\n", "\n\n\n", "  "]
LLAMA3 = (
    r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
SMALL = (
    "--batch", "2", "--tokens", "16", "--layers", "1", "--hidden", "32", "--vocabulary", "300",
    "--steps", "4", "--evaluate-every", "2", "--lr", "0.01",
)  # fmt: skip


def some_text(words: int) -> str:
    draw = random.Random(0)
    return " ".join(draw.choice(WORDS) + str(draw.randrange(999)) for _ in range(words))


def tokenizer_of(kind: str, text: str) -> Any:
    """A tokenizer of each family: seams change what the start or the end of a text does."""
    pieces = [text[i : i + 300] for i in range(0, len(text), 300)]
    if kind == "gpt2":
        return train_tokenizer(text, 600)
    if kind == "llama3":
        made = Tokenizer(models.BPE())
        split = pre_tokenizers.Split(Regex(LLAMA3), "isolated")
        bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_])
        made.post_processor = processors.ByteLevel(trim_offsets=True)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        made.train_from_iterator(
            pieces,
            trainers.BpeTrainer(vocab_size=600, show_progress=False, initial_alphabet=alphabet),
        )
    elif kind == "llama2":  # each text begins with a space of its own
        made = Tokenizer(models.BPE())
        spaces = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        made.normalizer = normalizers.Sequence(spaces)
        made.train_from_iterator(
            pieces,
            trainers.BpeTrainer(vocab_size=600, show_progress=False, max_token_length=16),
        )
    else:
        made = Tokenizer(models.Unigram())
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = trainers.UnigramTrainer(
            vocab_size=300, show_progress=False, unk_token="<unk>", special_tokens=["<unk>"]
        )
        made.train_from_iterator(pieces, trainer)
    return made


@pytest.mark.parametrize("kind", ["gpt2", "llama3", "llama2", "unigram"])
def test_tokens_of_pieces_are_those_of_the_whole(kind: str) -> None:
    text = some_text(3000)
    tokenizer = tokenizer_of(kind, text)
    whole = encode(tokenizer, text)
    for size in (400, 1717, 9000, len(text)):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        actual = np.concatenate([*tokenised(tokenizer, pieces, 150)])
        np.testing.assert_array_equal(actual, whole)


def test_what_no_seam_goes_through_is_kept_whole_too() -> None:
    """A word of a million letters has no place to cut: nothing of it is lost."""
    text = "a" * 5000 + " b" * 300
    tokenizer = train_tokenizer("a b", 257)
    actual = np.concatenate([*tokenised(tokenizer, [text[:2000], text[2000:]], 100)])
    assert tokenizer.decode(actual.tolist()) == text


@pytest.mark.parametrize("block", [7, 64, 4096])
def test_a_text_is_split_as_a_whole_one(
    block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However it is read: the parts are those of the rule, written down for a text in memory."""
    monkeypatch.setattr(texts, "BLOCK", block)
    for number, text in enumerate((some_text(500), "x" * 999 + "é" * 99, "é\n\n" * 40, "ab")):
        path = tmp_path / f"{number}.txt"
        path.write_bytes(text.encode())
        expected = int(min(len(text) * texts.HELD_OUT_SHARE, texts.HELD_OUT_CHARACTERS))
        end = len(text) - expected
        cut = text.rfind("\n\n", 0, end) + 2
        far = cut < 2 or len(text[: cut - 2].encode()) < path.stat().st_size // 2
        cut = end if far else cut
        seen = {paragraph.strip() for paragraph in text[:cut].split("\n\n")}
        end_part = text[cut:].split("\n\n")
        new = [p for p in end_part if p.strip() not in seen]
        repeats = not "".join(new).strip() and bool("".join(end_part).strip())
        actual = read_text(path)
        assert trained(actual) == text[:cut]
        assert actual.held_out == "\n\n".join(end_part if repeats else new)
        assert ("repeats earlier paragraphs" in actual.note) == repeats == (number == 2)


def test_a_text_whose_end_repeats_its_beginning_trains(tmp_path: Path) -> None:
    text = some_text(300)
    path = tmp_path / "text.txt"
    path.write_text(text + "\n\n" + text)
    result = run("finetune", "--text", path, "--steps", 1, "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    assert "the end of the text repeats earlier paragraphs" in result.stderr


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("end", ["\n\n", "\r\n\r\n"])
def test_line_ends_and_marks_of_windows(
    end: str, mark: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [f"Paragraph {number} says that a thing is a thing." for number in range(40)]
    path = tmp_path / "text.txt"
    path.write_bytes(mark + end.join([*parts, *parts[:10], "fresh"]).encode())
    for block in (7, 4096):
        monkeypatch.setattr(texts, "BLOCK", block)
        actual = read_text(path)
        assert actual.held_out == "fresh"
        assert trained(actual).startswith("Paragraph 0")


def test_a_byte_that_is_no_text_is_named_in_any_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts, "BLOCK", 8)
    for place, broken in ((0, b"\xff"), (9, b"\xff"), (15, "é".encode()[:1]), (30, b"\xc3")):
        path = tmp_path / "text.txt"
        path.write_bytes(b"x" * place + broken + b"y" * (30 - place))
        result = run("finetune", "--text", path, "--out", tmp_path / "run")
        assert_one_clear_error(result, f"is not UTF-8: byte {place} is 0x{broken[0]:02x}; convert")


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A text that counts as large, and a cache of its own."""
    monkeypatch.setenv(tokens.CACHE, str(tmp_path / "cache"))
    for module in (texts, tokens):
        monkeypatch.setattr(module, "SMALL", 1000)
        monkeypatch.setattr(module, "PIECE", 3000)
    path = tmp_path / "large.txt"
    path.write_text(some_text(3000))
    return path


@pytest.mark.slow
def test_a_text_is_tokenised_once(
    large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run reads the file, and both learn what a text in memory is learned as."""
    command = ("finetune", "--text", large, *SMALL, "--out")
    assert run(*command, tmp_path / "first").exit_code == 0
    (file,) = (tmp_path / "cache").iterdir()
    assert file.suffix == ".uint16"
    with monkeypatch.context() as patch:
        patch.setattr(tokens, "tokenised", None)
        assert run(*command, tmp_path / "second").exit_code == 0
    other = read_text(large)
    actual = tokens_of(other, train_tokenizer(trained(other), 290))
    assert isinstance(actual, StoredTokens)
    assert len([*(tmp_path / "cache").iterdir()]) == 2, "another tokenizer has a file of its own"
    monkeypatch.setattr(tokens, "SMALL", 10**9)
    assert run(*command, tmp_path / "third").exit_code == 0
    for name in ("second", "third"):
        assert weights(tmp_path / name) == weights(tmp_path / "first")
        assert numbers(tmp_path / name) == numbers(tmp_path / "first")


def test_each_share_of_a_large_text_has_its_tokens(large: Path) -> None:
    """The parts of another share are the same text together, but its tokens are others."""
    tokenizer, whole = train_tokenizer("some words of a text", 290), read_text(large)
    for text in (whole, *(texts.resplit(whole, share) for share in (0.3, 0.05, 0.3))):
        actual = tokens_of(text, tokenizer)
        np.testing.assert_array_equal(actual[:], encode(tokenizer, trained(text)))


def test_a_disk_that_is_too_small_is_named_before_it_is_full(
    large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 1000

    with monkeypatch.context() as patch:
        patch.setattr(files.shutil, "disk_usage", lambda _: Usage)  # type: ignore[attr-defined]
        result = run("finetune", "--text", large, *SMALL, "--out", tmp_path / "run")
    assert_one_clear_error(result, f"the token file of --data ({tokens.CACHE}) needs", "make room")
    assert not [*(tmp_path / "cache").iterdir()]
    assert not (tmp_path / "run").exists()
    monkeypatch.setenv(tokens.CACHE, str(large))
    result = run("finetune", "--text", large, *SMALL, "--out", tmp_path / "run")
    assert_one_clear_error(result, f"{tokens.CACHE}={large} cannot be created", "set it to a")


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_file_that_is_not_finished_is_removed(
    error: BaseException, large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tokens.tokenised

    def breaking(*arguments: Any) -> Any:
        yield next(whole(*arguments))
        raise error

    monkeypatch.setattr(tokens, "tokenised", breaking)
    result = run("finetune", "--text", large, *SMALL, "--out", tmp_path / "run")
    assert result.exit_code != 0
    assert not [*(tmp_path / "cache").iterdir()]
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no flock")
@pytest.mark.parametrize("end", ["done", "stopped"])
def test_a_run_that_waited_for_another_gets_the_same_tokens(
    end: str, large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether that one made the file or left it; nothing else stays behind."""
    import fcntl

    text = read_text(large)
    tokenizer = train_tokenizer(trained(text), 290)
    made = tokens_of(text, tokenizer)
    (path,) = (tmp_path / "cache").iterdir()
    partial, whole = path.with_name(path.name + ".partial"), path.read_bytes()
    path.unlink()
    waits = threading.Event()
    monkeypatch.setattr(tokens, "announce", lambda _: waits.set())
    with partial.open("wb") as file, ThreadPoolExecutor() as threads:
        fcntl.flock(file, fcntl.LOCK_EX)
        actual = threads.submit(tokens_of, text, tokenizer)
        assert waits.wait(30)
        if end == "done":
            file.write(whole)
            file.flush()
            partial.replace(path)
        else:
            partial.unlink()
        fcntl.flock(file, fcntl.LOCK_UN)
        assert (actual.result(30)[:] == made[:]).all()
    assert [*(tmp_path / "cache").iterdir()] == [path]
    assert path.read_bytes() == whole


DAMAGE = {
    "zeros": lambda data, other: bytes(len(data)),
    "half of it": lambda data, other: data[: len(data) // 2],
    "nothing": lambda data, other: b"",
    "shuffled": lambda data, other: data[400:800] + data[:400] + data[800:],
    "one bit": lambda data, other: data[:99] + bytes([data[99] ^ 1]) + data[100:],
    "one token less": lambda data, other: data[2:],
    "without a digest": lambda data, other: data[:-32],
    "of another text": lambda data, other: other,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_tokens_that_are_not_what_was_written_are_made_again(
    damage: Any, large: Path, tmp_path: Path
) -> None:
    tokenizer = train_tokenizer("some words of a text", 290)
    text = read_text(large)
    expected = tokens_of(text, tokenizer)[:].tolist()
    (file,) = (tmp_path / "cache").iterdir()
    whole = file.read_bytes()
    large.write_text(some_text(2500))
    tokens_of(read_text(large), tokenizer)
    (other,) = {*(tmp_path / "cache").iterdir()} - {file}
    large.write_text(some_text(3000))
    file.write_bytes(damage(whole, other.read_bytes()))
    assert tokens_of(text, tokenizer)[:].tolist() == expected
    assert file.read_bytes() == whole
    assert {*(tmp_path / "cache").iterdir()} == {file, other}


@pytest.mark.skipif(os.name == "nt", reason="Windows has other permissions")
@pytest.mark.parametrize("fault", ["writable", "given away", "link"])
def test_tokens_that_others_can_write_are_made_again(
    fault: str, large: Path, tmp_path: Path
) -> None:
    """Their digest may be right: everybody can compute it."""
    tokenizer, text = train_tokenizer("some words of a text", 290), read_text(large)
    tokens_of(text, tokenizer)
    (file,) = (tmp_path / "cache").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600, "a text may be confidential"
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    if fault == "writable":
        file.chmod(0o622)
    elif os.geteuid():
        pytest.skip("only root can give a file away")
    elif fault == "link":
        file.rename(tmp_path / "theirs")
        file.symlink_to(tmp_path / "theirs")
        os.chown(file, 12345, -1, follow_symlinks=False)
    else:
        os.chown(file, 12345, -1)
    before = file.lstat().st_ino
    tokens_of(text, tokenizer)
    assert file.lstat().st_ino != before
    assert stat.S_IMODE(file.lstat().st_mode) == 0o600
    assert file.lstat().st_uid == os.geteuid()


def test_a_file_that_gets_shorter_during_a_run_is_an_error(large: Path, tmp_path: Path) -> None:
    """A memory map would end the process; the next run makes the tokens again."""
    tokenizer, text = train_tokenizer("some words of a text", 290), read_text(large)
    made = tokens_of(text, tokenizer)
    assert isinstance(made, StoredTokens)
    expected = encode(tokenizer, "".join(part for _, part in text.blocks()))
    assert made[:].tolist() == expected.tolist()
    assert made[7:9].tolist() == expected[7:9].tolist()
    assert made.max() == expected.max()
    (file,) = (tmp_path / "cache").iterdir()
    os.truncate(file, 100)
    assert made[:9].tolist() == expected[:9].tolist()
    with pytest.raises(ConfigError, match="got shorter during the run; start the run"):
        Batches(made, batch=2, length=16, seed=0).at(1)
    assert tokens_of(text, tokenizer)[:].tolist() == expected.tolist()


def test_a_file_that_is_removed_during_a_run_is_still_read(large: Path, tmp_path: Path) -> None:
    tokenizer, text = train_tokenizer("some words of a text", 290), read_text(large)
    made = tokens_of(text, tokenizer)
    expected = made[:].tolist()
    for file in (tmp_path / "cache").iterdir():
        file.unlink()
    assert made[:].tolist() == expected


def test_a_text_that_changes_before_it_is_tokenised_is_an_error(
    large: Path, tmp_path: Path
) -> None:
    """Its tokens would be those of another text under the name of this one."""
    text = read_text(large)
    large.write_text(large.read_text().replace("1", "2"))
    with pytest.raises(ConfigError, match="has changed since the run began"):
        tokens_of(text, train_tokenizer("some words of a text", 290))
    assert not [*(tmp_path / "cache").iterdir()]


MEASURED = """
import resource, sys
from pathlib import Path
from unsloth_cupy.finetune.data.text import read_text
from unsloth_cupy.finetune.data.tokenizer import train_tokenizer
from unsloth_cupy.finetune.data.tokens import tokens_of

tokenizer = train_tokenizer("some words of a text", 300)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
tokens_of(read_text(Path(sys.argv[1])), tokenizer)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is of KiB on Linux alone")
def test_memory_does_not_grow_with_the_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """200 bytes for a byte of text were 340 MB for this one."""
    monkeypatch.setenv(tokens.CACHE, str(tmp_path / "cache"))
    path = tmp_path / "text.txt"
    path.write_text("some words of a text, and then some more. " * 40_000)
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, path], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 150 * 1024


NOBODY = """
import os, pwd

def unknown(who):
    raise KeyError(who)

pwd.getpwuid = pwd.getpwnam = unknown
from unsloth_cupy.cli import main

main()
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="users without a name or a home are those of POSIX")
@pytest.mark.parametrize("closed", ["", "0<&- 2>&-"])
def test_a_user_without_home_and_name_trains(closed: str, tmp_path: Path) -> None:
    """As in a container with a uid of its own; standard error may be closed."""
    text = tmp_path / "text.txt"
    text.write_text("some words of a text, and then some more. " * 29_000)
    assert text.stat().st_size > texts.SMALL
    command = [
        sys.executable,
        "-c",
        NOBODY,
        "finetune",
        "--text",
        str(text),
        *SMALL,
        "--out",
        "run",
    ]
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", *command],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "evaluation loss" in done.stdout
    place = tmp_path / f"unsloth_cupy-{os.geteuid()}"
    assert closed or f"using {place} instead" in done.stderr
    assert [file.suffix for file in place.glob("*.*")] == [".uint16"]  # beside CuPy's folder
    assert not (tmp_path / "~").exists()
    assert (tmp_path / "run" / "model").is_dir()


@pytest.mark.parametrize("tokens", [2, 9, 17, 40, 43])
def test_every_held_out_token_but_the_first_is_a_label_once(tokens: int) -> None:
    batches = texts.held_out_rows(np.arange(tokens) + 1, batch=2, length=9)
    labels = [batch.labels[batch.labels != objective.IGNORE] for batch in batches]
    np.testing.assert_array_equal(np.concatenate(labels), np.arange(2, tokens + 1))
    assert [batch.label_count for batch in batches] == [*map(len, labels)]
    assert [batch.real for batch in batches] == [int((b.tokens > 0).sum()) for b in batches]


def batch_of(draws: np.random.Generator, packed: bool) -> Batch:
    """Return a batch of random numbers, with arrays per token and for the whole batch."""
    shape = (1, 12) if packed else (3, 4)
    arrays = [draws.integers(0, 99, shape) for _ in range(4)]
    return Batch(
        *arrays[:2], np.array([0, 5, 12]) if packed else None, *draws.integers(1, 99, 3).tolist(),
        {"real": arrays[2] > 50, "a.b": draws.random((*shape, 2))}, {"k": draws.random(3)},
    )  # fmt: skip


@pytest.mark.parametrize("count", [0, 1, 12])
def test_batches_that_are_stored_are_the_same(count: int) -> None:
    """With all arrays and numbers, in their order, also of more than ten."""
    draws = np.random.default_rng(count)
    batches = [batch_of(draws, packed=n % 3 > 0) for n in range(count)]
    stored = texts.tensors_of(batches)
    actual = texts.batches_of(dict(reversed(stored.items())))
    assert len(actual) == count
    for one, other in zip(actual, batches, strict=True):
        assert one[3:6] == other[3:6]
        for mine, theirs in ((one.beside, other.beside), (one.facts, other.facts)):
            assert mine.keys() == theirs.keys()
            for name in mine:
                np.testing.assert_array_equal(mine[name], theirs[name])
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.labels, other.labels)
        assert (one.offsets is None) == (other.offsets is None)
        if one.offsets is not None:
            np.testing.assert_array_equal(one.offsets, other.offsets)


def test_a_batch_without_texts_has_the_arrays_of_one() -> None:
    for packed in (True, False):
        batch = batch_of(np.random.default_rng(0), packed)
        actual = texts.without_texts(batch)
        assert (actual.label_count, actual.real, actual.group) == (0, 0, batch.group)
        assert actual.beside.keys() == batch.beside.keys()
        assert actual.facts is batch.facts
        empty = (1, 0) if packed else (0, 4)
        pairs = [(actual.tokens, batch.tokens), (actual.labels, batch.labels)]
        pairs += [(actual.beside[name], batch.beside[name]) for name in batch.beside]
        for mine, array in pairs:
            assert (mine.shape, mine.dtype) == (empty + array.shape[2:], array.dtype)
        assert (None if actual.offsets is None else [*actual.offsets]) == ([0] if packed else None)


@pytest.mark.parametrize("length", [2, 5, 16])
def test_windows_of_a_text(length: int) -> None:
    """Each epoch takes all of them once, at another shift; a text of two rows is the shortest."""
    with pytest.raises(ConfigError, match=f"has {2 * length - 1} .* of {length} need {2 * length}"):
        Batches(np.arange(2 * length - 1), batch=1, length=length, seed=0)
    for count in (2 * length, 3 * length - 1, 7 * length, 9 * length + 1):
        windows, rows, starts = count // length - 1, 3, list[int]()
        batches = Batches(np.arange(count, dtype=np.uint16), batch=rows, length=length, seed=1)
        for step in range(2 * windows):
            batch = batches.at(step)
            assert (batch.tokens.dtype, batch.offsets) == (np.dtype(np.int64), None)
            assert (batch.label_count, batch.real) == (rows * (length - 1), rows * length)
            assert batch.labels is batch.tokens
            first = batch.tokens[:, 0]
            np.testing.assert_array_equal(batch.tokens, first[:, None] + np.arange(length))
            shown = f"rows from tokens {', '.join(map(str, first.tolist()))}"
            assert batches.where(step) == shown
            starts += first.tolist()
            assert batches.epoch(step + 1) == len(starts) / windows
        for epoch in range(len(starts) // windows):
            own = sorted(starts[epoch * windows :][:windows])
            assert 0 <= own[0] < length
            assert own == [own[0] + n * length for n in range(windows)]
        assert max(starts) + length <= count
        for epochs in (0.3, 1.0, 2.0):
            steps = batches.count(epochs)
            assert batches.epoch(steps - 1) < epochs <= batches.epoch(steps)
        assert batches.largest(5, 2) == [0]
    shifts = {Batches(np.arange(99), batch=1, length=9, seed=n).at(0).tokens[0, 0] % 9
              for n in range(40)}  # fmt: skip
    assert len(shifts) > 5


def test_the_baseline_is_the_frequency_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one more of each, so that a token of the held-out text alone has a loss."""
    draws = np.random.default_rng(0)
    train, labels = draws.integers(0, 20, 300), draws.integers(0, 30, 50)
    shares = (np.bincount(train, minlength=30) + 1) / (300 + 30)
    expected = -np.log(shares[labels]).mean()
    for piece in (7, 300, 1000):
        monkeypatch.setattr(texts, "COUNTED", piece)
        assert texts.unigram_baseline(train, labels, 30) == pytest.approx(expected, rel=1e-12)


def test_tokens_are_counted_in_parts(tmp_path: Path) -> None:
    """A million at a time, of which only one part is in memory."""
    asked = list[slice]()

    class Seen:
        def __len__(self) -> int:
            return 2**21 + 3

        def __getitem__(self, where: slice) -> Any:
            asked.append(where)
            return np.array([1, 2])

    texts.unigram_baseline(Seen(), np.array([1]), 4)
    assert asked == [slice(n, n + 2**20) for n in (0, 2**20, 2**21)]


@pytest.mark.parametrize(("cut", "blocks"), [(2**20, 1), (2**20 + 1, 33), (10, 1), (0, 0)])
def test_a_text_is_read_in_blocks(cut: int, blocks: int) -> None:
    """Up to 1 MiB as a whole, a larger one by 32 KiB; nothing behind the cut is read."""
    data = b"\xef\xbb\xbf" + b"a" * (2**20 + 9)
    text = texts.split("a", "x")._replace(opened=lambda: io.BytesIO(data), cut=cut)
    parts = [*text.blocks()]
    assert len(parts) == blocks
    assert b"".join(part for part, _ in parts) == data[:cut]
    assert "".join(part for _, part in parts) == "a" * max(0, cut - 3)


def test_a_text_without_words_or_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    with pytest.raises(ConfigError, match=r"a\.txt: No such file or directory; name a readable t"):
        read_text(path)
    for data in (b"", b" \n\n\t", b"\xef\xbb\xbf\n"):
        path.write_bytes(data)
        with pytest.raises(ConfigError, match=r"a\.txt is empty; pass a file with text in it"):
            read_text(path)
    with pytest.raises(ConfigError, match="name is empty; pass a file"):
        texts.split("name", "\n")
    path.write_bytes(b"a")
    assert read_text(path).name == "a"
    kept = read_text(path, "other", keep=object())
    assert (kept.name, kept.path) == ("other", None)


@pytest.mark.parametrize("share", [0.05, 0.3, 0.9])
def test_a_share_of_a_text_is_held_out(share: float) -> None:
    """Also more than the most characters that are held out without a share."""
    text = "".join(f"{n} " for n in range(60_000))
    usual = texts.split("a", text)
    actual = texts.resplit(usual, share)
    expected = int(share * len(text))
    assert len(actual.held_out) == expected
    assert actual.cut == len(text) - expected
    assert len(usual.held_out) == 34_889
    assert len(texts.split("a", text * 2).held_out) == 50_000


@pytest.mark.parametrize(
    ("size", "places", "expected"),
    [
        (3 * 2**20, [1.8], None), (3 * 2**20, [1.8, 2], 2), (3 * 2**20, [2, 2.5, 2.99], 2.5),
        (2**20, [0.49], None), (2**20, [0.51], 0.51), (2**20, [0.2, 0.6, 0.96], 0.6),
    ],
)  # fmt: skip
def test_the_end_of_a_paragraph_before_the_end_parts_a_text(
    size: int, places: list[float], expected: float | None
) -> None:
    """Of the last 1 MiB, and of the second half; else the text is cut where a tenth remains."""
    data = bytearray(b"ab" * (size // 2))
    for place in places:
        data[int(place * 2**20) : int(place * 2**20) + 2] = b"\n\n"
    actual = texts.split("a", data.decode())
    end = size - min(size // 10, 50_000)
    assert actual.cut == (end if expected is None else int(expected * 2**20) + 2)


def test_a_long_text_is_read_in_steps_that_progress_shows() -> None:
    steps = list[tuple[str, int, int]]()

    class Seen(Listener):
        def reading(self, what: str, size: int) -> Any:
            return contextlib.nullcontext(lambda count: steps.append((what, size, count)))

    size = 2**22 + 99
    with hearing(Seen()):
        cut = texts.split("a", "a" * size).cut
    assert steps == [("reading", size, 2**22), ("reading", size, 99), ("comparing", cut, cut)]


def test_the_room_for_tokens_is_known_from_their_first_piece(
    large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a fifth to spare, less the characters that two pieces share."""
    needed = list[int]()
    monkeypatch.setattr(tokens, "check_room", lambda *given: needed.append(given[2]))
    stored = tokens_of(read_text(large), train_tokenizer("some words of a text", 290))
    assert len(needed) == 1
    assert 1.05 < needed[0] / (2 * len(stored)) < 1.25


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_held_out_rows_are_as_long_as_they_may_be(batch: int) -> None:
    """The last token of a row begins the next one; the last row is not padded to more."""
    for length in (2, 3, 9):
        for count in range(2, 40):
            rows = texts.held_out_rows(np.arange(count) + 1, batch=batch, length=length)
            firsts = np.concatenate([each.tokens[:, 0] for each in rows])
            assert firsts.tolist() == [*range(1, count, length - 1)]
            assert [len(each.tokens) for each in rows[:-1]] == [batch] * (len(rows) - 1)
            assert len(rows[-1].tokens) <= batch
            widths = [each.tokens.shape[1] for each in rows]
            left = count - firsts[-1] + 1
            assert widths[:-1] == [length] * (len(rows) - 1)
            assert widths[-1] == (length if len(rows[-1].tokens) > 1 else left)
    for count in (0, 1):
        with pytest.raises(ConfigError, match="too short for an evaluation part"):
            texts.held_out_rows(np.arange(count), batch=batch, length=4)
