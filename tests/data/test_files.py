"""Data in other formats than plain JSON lines has the rows of the same data as JSON lines."""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import lzma

import pytest

from tunix_like.config.schema import DataConfig
from tunix_like.data import files, load_source
from tunix_like.errors import UserError

datasets = pytest.importorskip("datasets")
pyarrow = pytest.importorskip("pyarrow.parquet") and pytest.importorskip("pyarrow")

ROWS = [{"prompt": f'p{i} é, "q"\nline', "answer": f"00{i}", "more": "x"} for i in range(30)]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TUNIX_LIKE_CACHE", str(tmp_path / "cache"))


def write_table(path, rows, separator):
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=separator)
        writer.writeheader()
        writer.writerows(rows)


def write_zst(path, rows):
    with pyarrow.output_stream(str(path), compression="zstd") as out:
        out.write("".join(json.dumps(row) + "\n" for row in rows).encode())


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


WRITERS = {
    "jsonl.gz": lambda path, rows: path.write_bytes(gzip.compress(lines(rows))),
    "jsonl.xz": lambda path, rows: path.write_bytes(lzma.compress(lines(rows))),
    "jsonl.bz2": lambda path, rows: path.write_bytes(bz2.compress(lines(rows))),
    "jsonl.zst": write_zst,
    "ndjson": lambda path, rows: path.write_bytes(lines(rows)),
    "json": lambda path, rows: path.write_text(json.dumps(rows, indent=1)),
    "json.gz": lambda path, rows: path.write_bytes(gzip.compress(json.dumps(rows).encode())),
    "parquet": lambda path, rows: pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path),
    "csv": lambda path, rows: write_table(path, rows, ","),
    "tsv": lambda path, rows: write_table(path, rows, "\t"),
}


def source(path, **keys):
    return load_source(DataConfig(name="jsonl", path=str(path), **keys))


def all_rows(data):
    return [dict(row) for row in [*data.train, *data.eval]]


@pytest.mark.parametrize("ending", WRITERS)
def test_a_file_of_another_format(tmp_path, ending):
    file = tmp_path / f"mine.{ending}"
    WRITERS[ending](file, ROWS)
    data = source(file, eval_size=4)
    assert (len(data.eval), all_rows(data)) == (4, ROWS)
    WRITERS[ending](file, ROWS[:9])  # a new version of the file is read again
    assert all_rows(source(file)) == ROWS[:9]
    folder = tmp_path / "splits"
    folder.mkdir()
    WRITERS[ending](folder / f"train.{ending}", ROWS[:20])
    for part in range(2):
        WRITERS[ending](folder / f"test-0000{part}-of-00002.{ending}", ROWS[20 + 5 * part :][:5])
    data = source(folder)
    assert (len(data.train), all_rows(data)) == (20, ROWS)


def test_a_missing_part_is_an_error(tmp_path):
    for part in (0, 2):
        WRITERS["csv"](tmp_path / f"train-0000{part}-of-00003.csv", ROWS)
    with pytest.raises(UserError, match="train has 2 of 3 parts"):
        source(tmp_path)


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TUNIX_LIKE_CACHE", str(tmp_path / "file" / "cache"))
    WRITERS["csv"](tmp_path / "a.csv", ROWS)
    with pytest.raises(UserError, match="TUNIX_LIKE_CACHE"):
        source(tmp_path / "a.csv")


def test_folders_of_save_to_disk(tmp_path):
    whole = datasets.Dataset.from_list(ROWS)
    whole.save_to_disk(str(tmp_path / "one"))
    assert all_rows(source(tmp_path / "one")) == ROWS
    splits = {"train": whole.select(range(20)), "test": whole.select(range(20, 30))}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "two"))
    data = source(tmp_path / "two")
    assert (len(data.train), all_rows(data)) == (20, ROWS)


def test_a_file_is_converted_once_and_values_keep_their_types(tmp_path, monkeypatch):
    rows = [{"prompt": [{"role": "user", "content": "hi"}], "x": 1.5, "y": [1, 2], "z": None}] * 3
    WRITERS["parquet"](tmp_path / "a.parquet", rows)
    first = all_rows(source(tmp_path / "a.parquet"))
    assert first == rows
    monkeypatch.setattr(files, "_write", lambda *given: pytest.fail("converted again"))
    assert all_rows(source(tmp_path / "a.parquet")) == first


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.parquet", b"no parquet", r"a\.parquet: it cannot be read \("),
        ("a.jsonl.gz", b"\x1f\x8bno gzip", r"a\.jsonl\.gz: it cannot be read"),
        ("a.jsonl.gz", gzip.compress(lines(ROWS), mtime=0)[:-20], r"a\.jsonl\.gz: it cannot be read"),
        ("a.jsonl.zst", b"no zstd", r"a\.jsonl\.zst: it cannot be read"),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"prompt": "a"}\n{"b": 1}\n', mtime=0),
            r"a\.jsonl\.gz:2: .* needs column 'prompt'",
        ),
        ("a.csv", b"prompt,answer\na,b,c\n", r"a\.csv: .* line 2 has more fields"),
        ("a.csv", b"question\nx\n", r"a\.csv:1: .* needs column 'prompt'"),
        ("a.csv", b"", r"a\.csv is empty"),
        ("a.csv", b"prompt,x,x\na,b,c\n", r"a\.csv: .* column 'x' twice"),
        ("a.json", b'[{"prompt": "a"},]', r"a\.json: it cannot be read"),
        ("a.json", b"[1]", r"a\.json:1: a row must be a JSON object"),
    ],
)
def test_unreadable_files(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=said):
        source(tmp_path / name)
    assert not list(tmp_path.glob("cache/*.part"))


@pytest.mark.parametrize("name", ["gone.parquet", "gone.jsonl.gz", "gone.csv"])
def test_missing_files(tmp_path, name):
    with pytest.raises(UserError, match=f"{name} does not exist"):
        source(tmp_path / name)


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    WRITERS["parquet"](tmp_path / "a.parquet", ROWS)
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    with pytest.raises(UserError, match=r"a\.parquet: .*tunix-like\[hub\]"):
        source(tmp_path / "a.parquet")
