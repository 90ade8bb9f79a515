"""Records that are made here, without a framework: their files, names, wholes, texts and the command."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from hyper_parallel.cli.main import main
from hyper_parallel.debug import RecordError, compare
from hyper_parallel.debug.records.aligning import Names
from hyper_parallel.debug.records.files import Call, Entry, Place, Writer, read_record
from hyper_parallel.debug.records.rounding import Rounding, roundoff
from hyper_parallel.debug.records.samples import SUMS, grid_of, signed_sums
from hyper_parallel.debug.records.wholes import Whole, difference, tensors_of

LARGEST = 1 << 16


class Made:
    """A record of one rank or more that is written by hand."""

    def __init__(self, folder: Path, ranks: int = 1, largest: int = LARGEST) -> None:
        self.folder, self.ranks, self.largest = folder, ranks, largest
        self.writers = [Writer(folder, rank, ranks) for rank in range(ranks)]
        self.entries: list[list[Entry]] = [[] for _ in range(ranks)]
        self.places: list[Place] = []
        self.calls: list[Call] = []
        self.root: Place | None = None

    def add(self, key: tuple, values: Any, rank: int = 0, copy: bool = False, **options: Any) -> None:
        """An entry; ``whole`` and ``boxes`` are those of a tensor of one rank, unless there is a place."""
        x = np.asarray(values, np.float64)
        alone = self.ranks == 1
        grid = grid_of(x.shape, self.largest)
        sampled = x[np.ix_(*grid)] if grid else x
        sums = signed_sums(np.nan_to_num(x), x.shape, (0,) * x.ndim)
        given: dict[str, Any] = {
            "tensor": -1,
            "dtype": "float32",
            "local": x.shape,
            "whole": x.shape if alone else None,
            "place": -1,
            "boxes": (((0,) * x.ndim, x.shape, (0,) * x.ndim),) if alone else (),
            "sampled": sampled.size < x.size,
            "digest": str(hash(x.tobytes())),
            "squares": float(np.square(np.nan_to_num(x)).sum()),
            "not_finite": int((~np.isfinite(x)).sum()),
            "sums": tuple(sums) if sampled.size < x.size and alone else (),
            "own_sums": tuple(sums),
            **options,
        }
        values_at = None if copy else self.writers[rank].values(sampled)
        self.entries[rank].append(Entry(*key, **{**given, "values": values_at}))

    def close(self) -> Path:
        index = {
            "ranks": self.ranks,
            "platform": "none",
            "largest": self.largest,
            "root": None if self.root is None else asdict(self.root),
            "notes": [],
        }
        for writer, own in zip(self.writers, self.entries, strict=True):
            writer.close(index, self.calls, own, self.places)
        return self.folder


def output(path: str, number: int = 0, step: int = 0) -> tuple:
    return ("output", step, path, number, "", "")


def one(folder: Path, values: Any, key: tuple = output("up"), **options: Any) -> Path:
    made = Made(folder)
    made.add(key, values, **options)
    return made.close()


X = np.random.default_rng(0).standard_normal((4, 6))


def test_parts_without_a_place_take_the_shape_of_the_other(tmp_path: Path) -> None:
    """Rows, columns, summands, and copies of which one is another."""
    one(tmp_path / "one", X)
    parts: dict[str, list[np.ndarray]] = {
        "joined along dimension 0": np.split(X, 2),
        "joined along dimension 1": np.split(X, 2, 1),
        "summands": [X - 1, np.ones_like(X)],
        "": [X, X],
    }
    for i, (how, pieces) in enumerate(parts.items()):
        made = Made(tmp_path / str(i), 2)
        for rank, piece in enumerate(pieces):
            made.add(output("up"), piece, rank)
        found = compare(tmp_path / "one", made.close())
        assert not found.departs and how in found.rows[0].how and found.rows[0].shape == (4, 6)
    made = Made(tmp_path / "copies", 2)
    for rank in range(2):
        made.add(output("up"), X * (1 + 1e-3 * rank), rank)
    found = compare(tmp_path / "one", made.close())
    assert found.culprit == "up" and 1e-4 < found.rows[0].difference < 1e-2
    made = Made(tmp_path / "shapes", 2)
    for rank in range(2):
        made.add(output("up"), X[:3, : 2 + rank], rank)
    found = compare(tmp_path / "one", made.close())
    assert not found.rows[1:] and found.culprit == "up" and "shapes" in found.rows[0].how


def test_two_dimensions_of_ranks(tmp_path: Path) -> None:
    """Parts along both, on a mesh that the record knows; gradients of losses of each row of ranks are averaged."""
    made, whole = Made(tmp_path / "many", 4), Made(tmp_path / "one")
    made.root = Place(("dp", "tp"), (2, 2), (0, 1, 2, 3), ("?", "?"))
    for key in (output("up"), ("gradient", 0, "up", 0, "", "output")):
        whole.add(key, X)
        factor = 2 if key[0] == "gradient" else 1
        for rank in range(4):
            made.add(key, factor * X[2 * (rank // 2) :][:2, 3 * (rank % 2) :][:, :3], rank)
    found = compare(whole.close(), made.close())
    assert not found.departs and len(found.rows) == 2, str(found)
    assert found.rows[1].how.endswith("over 2 losses") and "losses" not in found.rows[0].how


def test_copies_are_written_once(tmp_path: Path) -> None:
    """One copy at a known place has values, and the digests of the others tell whether they are equal."""
    one(tmp_path / "one", X)
    for name, factor in (("same", 1.0), ("other", 1.01)):
        made = Made(tmp_path / name, 2)
        made.places = [Place(("tp",), (2,), (0, 1), ("R",))]
        made.add(output("up"), X, 0, place=0)
        made.add(output("up"), X * factor, 1, copy=True, place=0)
        found = compare(tmp_path / "one", made.close())
        assert found.departs is (factor != 1) and ("the copy of rank 1" in str(found)) is (factor != 1)


def test_samples_of_parts_are_samples_of_the_whole() -> None:
    """The places of a part, and their distance, are powers of two."""
    for shape, part in (((64, 32), (32, 32)), ((64, 32), (64, 16))):
        whole, own = (grid_of(s, 256) for s in (shape, part))
        for i, (a, b) in enumerate(zip(whole, own, strict=True)):
            assert set(a[a < part[i]]) <= set(b)
    assert [len(places) for places in grid_of((100, 3), 10)] == [2, 3] and grid_of((), 1) == []


def test_signed_sums_estimate_norms() -> None:
    rng = np.random.default_rng(1)
    found = [np.mean(np.square(signed_sums(rng.standard_normal((40, 30)), (40, 30), (0, 0)))) for _ in range(50)]
    assert 0.8 < np.mean(found) / 1200 < 1.2
    assert signed_sums(np.array(3.0), (), ()).tolist() == [3.0] * SUMS


def test_differences() -> None:
    def whole(x: Any) -> Whole:
        x = np.asarray(x, float)
        bad = int((~np.isfinite(x)).sum())
        return Whole(x.shape, tuple(map(np.arange, x.shape)), x, float(np.nansum(x * x)), bad, None)

    assert (
        difference(whole([3, 4]), whole([3, 4]))
        == 0
        == difference(whole([]), whole([]))
        == difference(whole([0]), whole([0]))
    )
    assert difference(whole([3, 4]), whole([3, 4.05])) == pytest.approx(0.01, rel=0.02)
    assert difference(whole([1, math.nan]), whole([1, 2])) == math.inf
    assert difference(whole([1, math.nan]), whole([math.nan, 1])) == math.inf
    assert difference(whole([math.nan]), whole([math.nan])) == 0
    assert difference(whole([1e-9]), whole([-1e-9]), floor=1.0) == pytest.approx(2e-9)


def test_rounding_grows_with_dtypes_lengths_and_differences() -> None:
    rounding = Rounding()
    rounding.see(("float32", "float32"), (2, 16))
    small = rounding.bound
    rounding.see(("float32", "float32"), (2, 4096))
    longer = rounding.bound
    rounding.agree(1e-5)
    after = rounding.bound
    rounding.see(("float32", "bfloat16"), (2,))
    assert 2**-24 < small < longer < after < rounding.bound < 0.1
    assert roundoff("float8_e4m3fn") == 0.125 and roundoff("int64") == 0


def test_names(tmp_path: Path) -> None:
    """Given ones, a common beginning, and modules by the order of their calls and their shapes."""
    names = Names({"model.layers.*": "blocks.*", "head": "out.proj", "": "net"})
    assert names("model.layers.3.mlp.up") == "blocks.3.mlp.up" and names("head") == "out.proj"
    assert names("head.weight") == "out.proj.weight" and names("norm") == "net.norm"
    paths: dict[str, list[str]] = {
        "a": ["up", "down", "norm"],
        "b": ["network.net.up", "network.net.down", "network.net.norm"],
        "c": ["w1", "down", "scale"],
    }
    for name, of in paths.items():
        made = Made(tmp_path / name)
        for i, path in enumerate(of):
            made.add(output(path), np.arange(i + 2.0))
            made.add(("parameter", 0, f"{path}.weight", 0, "", ""), np.arange(i + 2.0))
        made.close()
    for a, b in (("a", "b"), ("b", "a")):
        found = compare(tmp_path / a, tmp_path / b)
        assert len(found.rows) == 6 and not found.departs and not found.only_a, found.names
    found = compare(tmp_path / "a", tmp_path / "c")
    assert found.names["by_order"] == {"up": "w1", "norm": "scale"} and len(found.rows) == 6
    assert "aligned by order and shape: up = w1" in str(found)
    one(tmp_path / "d", np.zeros(9), output("other"))
    with pytest.raises(
        ValueError, match=r"no tensor in common: the first has 6, such as 'up'.*Map the paths with names="
    ):
        compare(tmp_path / "a", tmp_path / "d")


def test_a_dimension_of_one_is_no_difference(tmp_path: Path) -> None:
    """Kernels of 1-D convolutions have one more on MindSpore."""
    key = ("parameter", 0, "conv.weight", 0, "", "")
    found = compare(one(tmp_path / "a", X, key), one(tmp_path / "b", X.reshape(4, 1, 6), key))
    assert not found.departs and found.rows[0].shape == (4, 6)


def test_culprits(tmp_path: Path) -> None:
    """A first departure is charged to a module, from the calls around a tensor."""

    def made(name: str, wrong: Any = None) -> Path:
        record = Made(tmp_path / name)
        record.calls = [
            Call(0, "", "Model", 0, -1, (0,), (5,)),
            Call(0, "up", "Linear", 0, 0, (0,), (1,)),
            Call(0, "block", "Block", 0, 0, (2,), (4,)),
            Call(0, "block.inner", "Linear", 0, 2, (2,), (4,)),
        ]
        keys = {
            ("input", 0, "", 0, "", ""): 0,
            output("up"): 1,
            ("input", 0, "block", 0, "", ""): 2,
            output("block.inner"): 4,
            output(""): 5,
            ("gradient", 0, "", 0, "", "output"): 5,
            ("gradient", 0, "block.inner", 0, "", "output"): 4,
            ("parameter gradient", 0, "block.inner.weight", 0, "", ""): -1,
            ("gradient", 0, "block", 0, "", "input"): 2,
            ("gradient", 0, "up", 0, "", "output"): 1,
            ("gradient", 0, "", 0, "", "input"): 0,
            ("parameter gradient", 0, "weight", 0, "", ""): -1,
        }
        for key, tensor in keys.items():
            record.add(key, X * (1 + (key == wrong)), tensor=tensor)
        return record.close()

    right = made("right")
    expected = {
        ("input", 0, "", 0, "", ""): "the inputs of the run",
        output("up"): "up",
        ("input", 0, "block", 0, "", ""): "Model",
        output(""): "Model",
        ("gradient", 0, "", 0, "", "output"): "the loss",
        ("gradient", 0, "block.inner", 0, "", "output"): "Model",
        ("parameter gradient", 0, "block.inner.weight", 0, "", ""): "block.inner.weight",
        ("gradient", 0, "block", 0, "", "input"): "block.inner",
        ("gradient", 0, "up", 0, "", "output"): "Model",
        ("gradient", 0, "", 0, "", "input"): "up",
    }
    for i, (key, culprit) in enumerate(expected.items()):
        found = compare(right, made(str(i), key))
        assert found.culprit == culprit, key


def test_a_missing_gradient_departs(tmp_path: Path) -> None:
    for name, keys in (("a", "xy"), ("b", "x")):
        made = Made(tmp_path / name)
        for p in "xy":
            made.add(("parameter", 0, p, 0, "", ""), X)
        for p in keys:
            made.add(("parameter gradient", 0, p, 0, "", ""), X)
        made.close()
    found = compare(tmp_path / "a", tmp_path / "b")
    assert found.culprit == "y" and "no gradient" in str(found) and found.first is found.first_gradient
    first = json.loads(json.dumps(found.as_dict(), allow_nan=False))["first"]
    assert first["path"] == "y" and first["difference"] is None


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one(tmp_path / "a", X)
    one(tmp_path / "b", X * 1.5)
    one(tmp_path / "c", X, output("net.up"))
    a, b, c = (str(tmp_path / name) for name in "abc")
    assert main(["compare", a, a, "--all"]) == 0
    text = capsys.readouterr().out
    assert "The runs agree" in text and "output of up" in text
    picture = tmp_path / "difference.svg"
    assert main(["compare", a, b, "--svg", str(picture), "--reference", a]) == 1
    assert "part at up" in capsys.readouterr().out and "the runs part at up" in picture.read_text()
    assert ElementTree.fromstring(picture.read_text()).tag.endswith("svg")
    assert main(["compare", a, b, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["culprit"] == "up"
    assert main(["compare", a, c, "--name", "up=net.up"]) == 0
    assert main(["compare", a, c, "--name", "up"]) == 2
    assert "takes PATH_IN_A=PATH_IN_B" in capsys.readouterr().err
    assert main(["compare", a, str(tmp_path / "none")]) == 2
    assert "holds no record" in capsys.readouterr().err


def test_no_framework_is_imported(tmp_path: Path) -> None:
    one(tmp_path / "a", X)
    code = (
        "import sys; from hyper_parallel.debug import compare; assert not compare(*sys.argv[1:]).departs; "
        "print([name for name in ('torch', 'mindspore') if name in sys.modules])"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "a"), str(tmp_path / "a")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[]\n"


def rewrite(file: Path, **fields: Any) -> None:
    data = json.loads(file.read_text())
    file.write_text(json.dumps({**data, **fields}))


def changed_entry(file: Path, **fields: Any) -> None:
    entries = json.loads(file.read_text())["entries"]
    rewrite(file, entries=[{**entries[0], **fields}])


DAMAGES: dict[str, tuple[Any, str]] = {
    "no JSON": (lambda file: file.write_text("{"), "rank-0.json is not the index of a record"),
    "a list": (lambda file: file.write_text("[]"), "its format is not 'hyper_parallel record'"),
    "other version": (lambda file: rewrite(file, version=9), "has version 9 of the format"),
    "a field": (lambda file: rewrite(file, notes=3), "rank-0.json is damaged: its field 'notes' is 3"),
    "renamed": (lambda file: rewrite(file, rank=1), "the file was renamed"),
    "an entry": (lambda file: rewrite(file, entries=[{"kind": "output"}]), "is not a valid entry"),
    "a kind": (lambda file: changed_entry(file, kind="other"), "is not consistent with the others"),
    "a place": (lambda file: changed_entry(file, place=4), "is not consistent with the others"),
    "values": (lambda file: changed_entry(file, values=[0, 999]), "is not consistent with the others"),
    "too few values": (lambda file: changed_entry(file, values=[0, 3]), "is not consistent with the others"),
    "a shape": (lambda file: changed_entry(file, local=[-4, 6]), "is not consistent with the others"),
    "a box": (lambda file: changed_entry(file, boxes=[[[0, 0], [9, 6], [0, 0]]]), "is not consistent with the others"),
    "a word for a number": (lambda file: changed_entry(file, squares="many"), "is not consistent with the others"),
    "fewer numbers": (
        lambda file: rewrite(file, largest=3),
        "entry 0 of 'up' (output) is not consistent with the others",
    ),
    "a mesh": (
        lambda file: rewrite(file, places=[{"names": ["tp"], "shape": [2], "ranks": [0], "placements": ["R"]}]),
        "place 0 is not consistent with the others",
    ),
    "the root": (
        lambda file: rewrite(file, root={"names": [], "shape": [2], "ranks": [0, 1], "placements": ["R"]}),
        "place 0 is not consistent with the others",
    ),
    "a call": (
        lambda file: rewrite(file, calls=[{**asdict(Call(0, "up", "Linear", 0, 5))}]),
        "call 0 of 'up' (Linear) is not consistent with the others",
    ),
    "a tensor of a call": (
        lambda file: rewrite(file, calls=[{**asdict(Call(0, "up", "Linear", 0, -1)), "inputs": ["x"]}]),
        "call 0 of 'up' (Linear) is not consistent with the others",
    ),
    "cut": (lambda file: file.with_suffix(".bin").write_bytes(b"1234"), "rank-0.bin has 4 bytes"),
    "no arrays": (lambda file: file.with_suffix(".bin").unlink(), "rank-0.bin cannot be read"),
    "rank that is not there": (
        lambda file: rewrite(
            file, places=[{"names": ["tp"], "shape": [2], "ranks": [0, 1], "placements": ["R"]}], ranks=2
        ),
        "lacks rank-1.json",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_named(tmp_path: Path, damage: str) -> None:
    spoil, message = DAMAGES[damage]
    spoil(one(tmp_path, X) / "rank-0.json")
    with pytest.raises(RecordError) as error:
        tensors_of(read_record(tmp_path))
    assert message in str(error.value) and str(tmp_path) in str(error.value)


def test_files_of_two_runs(tmp_path: Path) -> None:
    """Rank 0 removes those of ranks that there are no longer; files of other runs are an error."""
    Made(tmp_path, 3).close()
    Made(tmp_path, 2).close()
    assert not (tmp_path / "rank-2.json").exists() and len(read_record(tmp_path).entries) == 2
    rewrite(tmp_path / "rank-1.json", ranks=3)
    with pytest.raises(RecordError, match="one folder holds files of two runs"):
        read_record(tmp_path)
