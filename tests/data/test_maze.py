"""Tests the maze source: the number of mazes, their structure, the shortest path as the answer, and disjoint splits."""

import itertools
import json
import random

import pytest

from tests.parameters import others_slow
from tunix_like.config.schema import DataConfig
from tunix_like.data import load_source, maze
from tunix_like.errors import UserError
from tunix_like.tasks.maze import MOVES, walk


def source(**keys):
    return load_source(DataConfig(name="maze", **keys))


def flood(grid):
    """Returns the distance of every open cell from START by repeated relaxation, an oracle that shares no code with
    `solve`."""
    rows = grid.split("\n")
    cells = {(r, c) for r, row in enumerate(rows) for c, cell in enumerate(row) if cell != "#"}
    distance = {cell: 0 if cell == (1, 1) else 10**9 for cell in cells}
    for _ in cells:
        for r, c in cells:
            around = [distance[r + d, c + e] + 1 for d, e in MOVES.values() if (r + d, c + e) in cells]
            distance[r, c] = min([distance[r, c], *around])
    return distance


@pytest.mark.parametrize("size", [5, 7, 9, 13])
def test_a_grid_is_a_perfect_maze_with_the_shortest_path_as_answer(size):
    rng = random.Random(3)
    for _ in range(5):
        grid = maze.make(size, rng)
        rows = grid.split("\n")
        assert len(rows) == size and {len(row) for row in rows} == {size}
        assert rows[1][1] == "S" and rows[size - 2][size - 2] == "G"
        assert set(rows[0] + rows[-1] + "".join(row[0] + row[-1] for row in rows)) == {"#"}
        distance = flood(grid)
        m = (size - 1) // 2
        assert len(distance) == 2 * m * m - 1  # m*m cells and m*m - 1 passages: a spanning tree, if connected
        assert max(distance.values()) < 10**9
        moves = maze.solve(grid)
        assert len(moves) == distance[size - 2, size - 2]
        assert walk(grid, " ".join([*moves, "DONE"])).reached


def test_solve_returns_the_shortest_of_several_paths():
    assert maze.solve("#######\n#S....#\n#.###.#\n#.....#\n###.###\n#....G#\n#######") == ["DOWN"] * 2 + [
        *["RIGHT"] * 2,
        *["DOWN"] * 2,
        *["RIGHT"] * 2,
    ]
    with pytest.raises(UserError, match="no path"):
        maze.solve("#####\n#S#.#\n###.#\n#..G#\n#####")


def test_every_existing_maze_can_be_drawn():
    five = source(maze_size=5, train_size=3, eval_size=1)
    assert len({row["grid"] for row in [*five.train, *five.eval]}) == 4
    seven = source(maze_size=7, train_size=160, eval_size=32)
    assert len({row["grid"] for row in [*seven.train, *seven.eval]}) == 192


@pytest.mark.parametrize(
    "size, asked, exist", [(5, (4, 1), "4 "), (7, (150, 43), "192 "), (9, (100_300, 53), "100352 ")]
)
def test_error_states_the_number_of_existing_mazes(size, asked, exist):
    with pytest.raises(UserError, match=f"data.maze_size={size}: only {exist}"):
        source(maze_size=size, train_size=asked[0], eval_size=asked[1])


def test_error_states_large_counts_and_sizes_must_be_odd():
    with pytest.raises(UserError, match="only 557568000 distinct"):
        source(maze_size=11, train_size=600_000_000)
    for size in (6, 8):
        with pytest.raises(UserError, match="odd"):
            source(maze_size=size)


def test_default_size_splits_are_disjoint_distinct_and_follow_the_seed():
    first = source(seed=1)
    train, held_out = [row["grid"] for row in first.train], [row["grid"] for row in first.eval]
    assert (len(train), len(held_out)) == (8000, 256)
    assert len({*train, *held_out}) == 8256
    assert [row["grid"] for row in source(seed=1, train_size=10).eval] == held_out  # the training rows are drawn first
    assert [row["grid"] for row in source(seed=2, train_size=10).eval] != held_out
    assert first.reward == "maze"


def test_prompt_format_and_ids_by_hand():
    grid = "#####\n#S#.#\n#.#.#\n#..G#\n#####"
    row = maze.record(grid)
    assert row["answer"] == "DOWN DOWN RIGHT RIGHT DONE"
    assert row["prompt"] == (
        "GRID_START WALL WALL WALL WALL WALL NEWLINE WALL START WALL PATH WALL NEWLINE "
        "WALL PATH WALL PATH WALL NEWLINE WALL PATH PATH GOAL WALL NEWLINE WALL WALL WALL WALL WALL NEWLINE "
        "GRID_END PATH_START"
    )
    tokenizer = maze.tokenizer()
    order = (
        "<pad> <bos> <eos> <unk> GRID_START GRID_END PATH_START DONE PATH WALL GOAL START NEWLINE UP DOWN LEFT RIGHT"
    )
    ids = tokenizer.encode(order, add_special_tokens=False)
    assert ids == list(range(17)) and tokenizer.vocab_size == 32
    assert tokenizer.encode(row["prompt"])[:4] == [1, 4, 9, 9]
    assert tokenizer.encode(row["answer"], add_special_tokens=False) == [14, 14, 16, 16, 7]
    assert tokenizer.decode([14, 16, 3, 20, 7, 2]) == "DOWN RIGHT <unk> <reserved_3> DONE"
    nine = source(train_size=1, eval_size=1)
    assert len(nine.tokenizer.encode(nine.train[0]["prompt"])) == 94


@pytest.mark.parametrize("model_type", others_slow(["qwen2", "llama"], "qwen2"))
def test_saved_tokenizer_loads_in_transformers(tmp_path, model_type):
    from transformers import AutoTokenizer

    ours = maze.tokenizer()
    ours.save(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    row = source(train_size=1, eval_size=1).train[0]
    ids = ours.encode(row["prompt"])
    assert theirs(row["prompt"])["input_ids"] == ids and len(theirs) == 32
    assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids) == row["prompt"]


def test_drawing():
    grid = "#####\n#S#.#\n#.#.#\n#..G#\n#####"
    assert maze.draw(grid, "DOWN DOWN RIGHT RIGHT DONE").split("\n") == [
        "██████████",
        "██S ██  ██",
        "██••██  ██",
        "██••••G ██",
        "██████████",
    ]
    assert maze.draw(grid, "DOWN RIGHT DONE").split("\n")[2] == "██x ██  ██"  # stopped before a wall
    assert maze.draw(grid, "").split("\n")[1] == "██S ██  ██"


def test_rows_can_be_sliced_and_sent_to_workers():
    import pickle

    rows = source(train_size=5, eval_size=2).train
    assert [row["grid"] for row in rows[1:3]] == [rows[1]["grid"], rows[2]["grid"]]
    assert list(pickle.loads(pickle.dumps(rows))) == list(itertools.islice(rows, 5))


def test_keys_of_other_sources_are_refused():
    with pytest.raises(UserError, match="data.text_length is not read by data.name=maze"):
        source(text_length=4)
    with pytest.raises(UserError, match="data.path is not read"):
        source(path="x")
    with pytest.raises(UserError, match="data.name=mazes is unknown. Did you mean 'maze'"):
        load_source(DataConfig(name="mazes"))


def test_pairs_have_a_right_and_a_wrong_walk_of_the_same_maze():
    """The wrong walk leaves the right path at a junction and steps into no wall. The rows are the same every time."""
    made = load_source(DataConfig(name="maze_pairs", maze_size=7, train_size=120, eval_size=10))
    plain = source(maze_size=7, train_size=120, eval_size=10)
    turns = set()
    for pair, row in zip([*made.train, *made.eval], [*plain.train, *plain.eval], strict=True):
        assert pair == row | {"chosen": row["answer"], "rejected": pair["rejected"]} and pair == maze.with_pair(row)
        right, wrong = (pair[name].split() for name in ("chosen", "rejected"))
        assert wrong[-1] == "DONE" and 0 < len(wrong) <= len(right) and wrong != right
        path, reached = walk(row["grid"], pair["rejected"])
        assert not reached and len(path) == len(wrong), "every move is possible"
        turns.add(sum(1 for _ in itertools.takewhile(lambda both: both[0] == both[1], zip(right, wrong, strict=False))))
    assert len(turns) > 3
