"""Checkpoints and models in parts: a file of each rank, read by any number of ranks.

``grids.py`` saves the runs that it stops in parts, and goes on in other grids.
"""

import json
import shutil
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from unsloth_cupy import models
from unsloth_cupy.core.arrays import Unwritten
from unsloth_cupy.errors import ConfigError
from unsloth_cupy.finetune.run.run_folder import RunFolder
from unsloth_cupy.models.folders.checkpoint_files import opened
from unsloth_cupy.models.folders.tensor_file import data_digest
from unsloth_cupy.models.ranks import parts
from unsloth_cupy.models.ranks.parts import Entry, Parts, divided
from unsloth_cupy.parallel.grid import grid

from .commands import KILLS
from .grids import MIXTURE
from .ranks import by_sockets
from .test_finetune import WHOLE, asked, invoke, whole_after_two
from .test_nodes import TEXT
from .threads import by_threads

GRIDS = (
    *("--data-parallel 2", "--zero 1", "--zero 3"),
    *("--tensor-parallel 2", "--pipeline-parallel 2"),
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "numbers.txt"
    path.write_text(TEXT)
    return path


def arrays_in(folder: Path, stem: str) -> dict[str, Any]:
    """Return the arrays of all parts, or of the one file."""
    files = sorted(folder.glob(f"{stem}*.safetensors"))
    return {name: array for file in files for name, array in load_file(file).items()}


def same_bits(folder: Path, other: Path, stem: str) -> None:
    actual, expected = (arrays_in(each, stem) for each in (folder, other))
    assert actual.keys() == expected.keys()
    assert expected
    for name, array in expected.items():
        assert actual[name].dtype == array.dtype, name
        np.testing.assert_array_equal(actual[name], array, name)


@pytest.mark.parametrize(("data", "pipeline"), [(1, 4), (2, 2), (4, 1)])
@pytest.mark.parametrize("seen", [4, 3, 1])
def test_each_rank_that_sees_the_folder_writes_a_part(
    data: int,
    pipeline: int,
    seen: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Arrays of other stages are sent to the writer; an array of two stages is written once."""
    monkeypatch.setattr(parts, "ONE_FILE", 0)
    draw = np.random.default_rng(0)
    shapes = [(40, 7), (3,), (), (90, 11), (20, 20), (5, 5, 5), (60, 3)]
    whole = {f"w.{n}": draw.standard_normal(shape, np.float32) for n, shape in enumerate(shapes)}
    whole |= {"codes.1": draw.integers(0, 255, (30, 3), np.uint8)}
    (tmp_path / "seen").mkdir()

    def rank(comm: Any) -> dict[str, str]:
        place = grid(comm, data=data, pipeline=pipeline)
        stage = place.pipeline.rank
        own = {n: a for i, (n, a) in enumerate(whole.items()) if i % pipeline == stage or not i}
        arrays = {n: Unwritten(a.dtype, a.shape, a.copy) for n, a in own.items()}
        writing = Parts(comm, place, place.data, None)
        folder = tmp_path / ("seen" if comm.rank < seen else "unseen")
        return writing.write(folder, "model", writing.entries(arrays), arrays)

    digests = by_threads(4, rank)
    assert digests == [digests[0]] * 4
    files = {path.name: path for path in (tmp_path / "seen").glob("*.safetensors")}
    assert [*digests[0]] == sorted(files)
    assert len(files) == seen
    same = arrays_in(tmp_path / "seen", "model")
    assert same.keys() == whole.keys()
    for name, array in whole.items():
        np.testing.assert_array_equal(same[name], array)
    index = json.loads((tmp_path / "seen" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in whole.values())
    assert index["weight_map"] == {
        name: file for file, path in files.items() for name in load_file(path)
    }
    for file, path in files.items():
        assert index["metadata"]["sha256"][file] == digests[0][file] == data_digest(path)
        with path.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        for name, facts in header.items():
            if name != "__metadata__":
                assert facts["data_offsets"][0] % whole[name].itemsize == 0, name


def test_parts_have_about_equal_sizes() -> None:
    """Names stay in order; a part has at most one array more than its share."""
    draw = np.random.default_rng(1)
    entries = [
        Entry(str(n), 0, np.dtype("float32"), (int(size),))
        for n, size in enumerate(draw.integers(1, 1000, 200))
    ]
    for count in (1, 3, 7):
        made = divided(entries, count)
        assert [each for part in made for each in part] == entries
        share, largest = parts.size_of(entries) / count, 4000
        assert max(map(parts.size_of, made)) < share + largest
    assert divided(entries[:2], 5).count([]) == 3


@pytest.mark.slow
@pytest.mark.parametrize("options", GRIDS)
def test_a_save_in_parts_has_the_bits_of_one_file(options: str, text: Path, tmp_path: Path) -> None:
    """One process goes on from either with the same bits."""
    own = options.split()
    for name, more in (("parts", ("parts", "--")), ("one", ())):
        ended = by_sockets(2, WHOLE, *more, *asked(text, tmp_path / name, *own), limit=240)
        assert [each.code for each in ended] == [0, 0], ended
        assert len([*(tmp_path / name / "model").glob("*.safetensors")]) == 1 + bool(more)
    for folder, stem in (("model", "model"), ("checkpoint-00000006", "model"),
                         ("checkpoint-00000006", "optimizer")):  # fmt: skip
        same_bits(tmp_path / "parts" / folder, tmp_path / "one" / folder, stem)
    for name in ("parts", "one"):
        done = invoke(*asked(text, tmp_path / name, "--steps", "8"))
        assert done.exit_code == 0, done.output
        assert "resuming from" in done.output
        assert len([*(tmp_path / name / "model").glob("*.safetensors")]) == 1
    for folder, stem in (("model", "model"), ("checkpoint-00000008", "optimizer")):
        same_bits(tmp_path / "parts" / folder, tmp_path / "one" / folder, stem)


EXPERTS = "--expert-parallel 2"
WEIGHED = ("--data-parallel 2", "--zero 1", "--zero 3", "--tensor-parallel 2", EXPERTS)


@pytest.mark.slow
@pytest.mark.parametrize("options", WEIGHED)
def test_a_save_needs_the_memory_of_one_array(
    options: str, run: Path, text: Path, tmp_path: Path
) -> None:
    """In each rank: what is gathered is written before the next array is gathered."""
    sizes = ("--layers", "4", "--hidden", "512", "--steps", "1", "--tokens", "8")
    command = asked(text, tmp_path / "run", *sizes, *options.split())
    if options == EXPERTS:
        wide = {"hidden_size": 512, "moe_intermediate_size": 256, "num_hidden_layers": 4}
        models.create(MIXTURE | wide, seed=0).save(tmp_path / "experts")
        shutil.copy(run / "model" / "tokenizer.json", tmp_path / "experts")
        new = {"--layers", "--hidden", "--vocabulary"}
        pairs = pairwise(("", *command))
        words = [word for before, word in pairs if not {before, word} & new]
        command = (*words, str(tmp_path / "experts"))
    ended = by_sockets(2, WHOLE, "parts", "--", "weighed", "--", *command, limit=240)
    assert [each.code for each in ended] == [0, 0], ended
    assert ended[0].said.count("of the largest array") == 3, "checkpoint and model"


@pytest.mark.slow
@pytest.mark.parametrize("kill", [*KILLS])
def test_a_rank_that_is_killed_in_a_save(kill: str, text: Path, tmp_path: Path) -> None:
    """The newest complete checkpoint is there, and nothing else is left after the next start."""
    out = tmp_path / "run"
    command = asked(text, out, "--pipeline-parallel", "2")
    ended = by_sockets(2, WHOLE, "parts", "--", kill, "--", *command)
    assert -signal.SIGKILL in [each.code for each in ended], ended
    if kill != "committed":
        whole_after_two(text, out)
        return
    steps = [path.name[-1] for path in RunFolder(out).checkpoints()]
    assert steps == ["2", "4"], "the older one is removed after a step from the newer one"
    done = invoke(*asked(text, out))
    assert done.exit_code == 0, done.output
    assert f"resuming from {out / 'checkpoint-00000004'}" in done.output


@pytest.fixture(scope="module")
def run(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run whose two ranks wrote parts."""
    out = tmp_path_factory.mktemp("parts") / "run"
    ended = by_sockets(
        2, WHOLE, "parts", "--", *asked(text, out, "--pipeline-parallel", "2", "--steps", "2")
    )
    assert [each.code for each in ended] == [0, 0], ended
    return out


def changed(path: Path, change: str) -> None:
    """Change a part in a way that a copy, a disk or another save may."""
    content = path.read_bytes()
    if change == "missing":
        path.unlink()
    elif change == "truncated":
        path.write_bytes(content[:-4])
    elif change == "flipped":
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif change == "of another save":
        with opened(path) as file:
            facts, arrays = file.metadata(), load_file(path)
        save_file({n: a + 1 for n, a in arrays.items()}, path, facts | {"sha256": "0" * 64})
    else:  # a part of a save of three ranks
        shutil.copy(path, path.with_name(path.name.replace("of-00002", "of-00003")))


@pytest.mark.slow
@pytest.mark.parametrize("stem", ["model", "optimizer"])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("missing", "{name} is missing"),
        ("truncated", "truncated or broken|the SHA-256 of {name} is not"),
        ("flipped", "the SHA-256 of {name} is not the one in trainer.json"),
        ("of another save", "parts of two saves: {name} is not|the SHA-256 of {name} is not"),
        ("more", "parts of two saves: {stem}-00002-of-00003.safetensors is not in"),
    ],
)
def test_parts_that_do_not_belong_together_are_refused_by_name(
    stem: str, change: str, said: str, run: Path, text: Path, tmp_path: Path
) -> None:
    shutil.copytree(run, tmp_path / "run")
    path = tmp_path / "run" / "checkpoint-00000002" / f"{stem}-00002-of-00002.safetensors"
    changed(path, change)
    done = invoke(*asked(text, tmp_path / "run", "--steps", "4"))
    assert done.exit_code == 1
    pattern = said.format(name=path.name, stem=stem)
    assert any(each in done.output.replace("\n", "") for each in pattern.split("|")), done.output


@pytest.mark.slow
def test_indexes_of_two_saves_are_refused(run: Path, text: Path, tmp_path: Path) -> None:
    """The weights of the final model are not those of the checkpoint after other steps."""
    shutil.copytree(run, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoint-00000002"
    index = folder / "optimizer.safetensors.index.json"
    values = json.loads(index.read_text())
    name = min(values["metadata"]["sha256"])
    values["metadata"]["sha256"][name] = "0" * 64
    index.write_text(json.dumps(values))
    done = invoke(*asked(text, tmp_path / "run", "--steps", "4"))
    assert done.exit_code == 1
    assert f"{index.name} is of another save than trainer.json" in done.output.replace("\n", "")


@pytest.mark.slow
def test_programs_read_a_model_in_parts(run: Path, tmp_path: Path) -> None:
    """``load``, ``merge``, ``export`` and transformers; two saves are refused by them, too."""
    model = models.load(run / "model")
    tokens = np.arange(12)[None] % 300
    expected = model.logits(tokens)
    models.merge(run, tmp_path / "merged")
    np.testing.assert_array_equal(models.load(tmp_path / "merged").logits(tokens), expected)
    models.export_gguf(run, tmp_path / "run.gguf", kind="f32")
    np.testing.assert_allclose(models.load(tmp_path / "run.gguf").logits(tokens), expected, 1e-5)
    transformers = pytest.importorskip("transformers", reason="needs the peers: transformers")
    import torch

    peer = transformers.AutoModelForCausalLM.from_pretrained(run / "model")
    with torch.no_grad():
        actual = peer(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(actual, expected, atol=1e-4 * np.abs(expected).max())
    shutil.copytree(run, tmp_path / "run")
    changed(tmp_path / "run" / "model" / "model-00001-of-00002.safetensors", "of another save")
    for call in (
        lambda: models.load(tmp_path / "run" / "model"),
        lambda: models.merge(tmp_path / "run", tmp_path / "other"),
        lambda: models.export_gguf(tmp_path / "run", tmp_path / "other.gguf"),
    ):
        with pytest.raises(ConfigError, match=r"parts of two saves: model-00001-of-00002\.safet"):
            call()
