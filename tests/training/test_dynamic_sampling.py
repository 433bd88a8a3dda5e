"""Tests dynamic sampling in a complete learner: the trained rows, the end of the data, and bitwise resumption."""

from __future__ import annotations

import itertools
import json

import grain.python as grain
import jax
import numpy as np
import pytest
from flax import nnx

import tunix_like
from tests.callbacks import OnRow
from tests.tiny_model import HF
from tunix_like import MaxRLConfig, MaxRLLearner, OptimizerConfig, RLTrainingConfig, RolloutConfig, UserError
from tunix_like.data import reverse_text
from tunix_like.storage.metrics import rows as metric_rows

LETTERS = [a + b for a in "abcd" for b in "efgh"]
ROWS = [reverse_text.record(text) | {"row": i, "live": i % 3 == 0 or i > 10} for i, text in enumerate(LETTERS)]
"""Nine of the 16 rows give mixed groups, at irregular positions."""
BATCH, CAP = 2, 2


def mixed_where_live(prompts, completions, live):
    """Returns rewards that differ within the group of a live row, and are equal within other groups."""
    return [float(i % 4) / 2 + 0.25 * len(text) if live[i] else 0.5 for i, text in enumerate(completions)]


class Watched:
    """A small learner that records the numbers of the sampled problems and the rows that were trained on."""

    def __init__(self, folder=None, *, schedule="constant", **training):
        self.numbers, self.trained, self.rows = [], [], []
        self.learner = MaxRLLearner(
            model=tunix_like.load_model(HF, init="random")[0],
            tokenizer=reverse_text.tokenizer(),
            reward_fns=mixed_where_live,
            algo_config=MaxRLConfig(num_generations=4, dynamic_sampling=True, max_extra_batches=CAP),
            rollout_config=RolloutConfig(max_prompt_length=8, max_tokens_to_generate=4),
            training_config=RLTrainingConfig(
                output_dir=None if folder is None else str(folder),
                checkpoint_every_n_steps=1,
                log_rollouts_every_n_steps=1,
                actor_optimizer=OptimizerConfig(learning_rate=1e-2, schedule=schedule),
                **training,
            ),
            metric_fns=[self._keep],
        )
        generate = self.learner.engine.generate
        self.learner.engine.generate = lambda params, requests, *rest: (
            self.numbers.extend(request.number for request in requests) or generate(params, requests, *rest)
        )

    def _keep(self, prompts, completions, rewards, advantages, row, **columns):
        self.trained.append(row[::4])
        return {}

    def train(self, data, **arguments):
        self.learner.train(data, batch_size=BATCH, callbacks=[OnRow(self.rows.append)], **arguments)
        return self

    def params(self):
        return jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.split(self.learner.model)[1]))


def naive_steps(order):
    """Returns the rows of each step and the number of sampled batches, by the rule, until the rows are used up."""
    steps, order = [], list(order)
    while len(order) >= BATCH:
        drawn, batches = order[:BATCH], 1
        order = order[BATCH:]
        while sum(ROWS[n]["live"] for n in drawn) < BATCH and batches <= CAP and len(order) >= BATCH:
            drawn, order, batches = drawn + order[:BATCH], order[BATCH:], batches + 1
        live = [place for place, n in enumerate(drawn) if ROWS[n]["live"]]
        dead = [place for place, n in enumerate(drawn) if not ROWS[n]["live"]]
        steps.append(([drawn[place] for place in sorted((live + dead)[:BATCH])], batches))
    return steps


@pytest.mark.slow
def test_one_pass_ends_when_the_data_is_used_up(tmp_path):
    """With max_steps unset, the data determines the number of steps, every row is sampled once, and the last step gets
    the remaining rows. A schedule that needs the number of steps is rejected."""
    watched = Watched(tmp_path).train(ROWS, shuffle=False)
    expected = naive_steps(range(16))
    assert watched.trained == [rows for rows, _ in expected] and 3 < len(expected) < 8
    assert [row["train/dynamic_sampling/extra_batches"] + 1 for row in watched.rows] == [n for _, n in expected]
    assert {row["train/dynamic_sampling/extra_batches"] for row in watched.rows} == {0, 1, 2}
    assert watched.numbers == list(range(16))
    assert {row["train/perf/update_programs"] for row in watched.rows} == {1.0}
    for step, (rows, _) in enumerate(expected, 1):
        lines = (tmp_path / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines()
        kept = [json.loads(line) for line in lines]
        assert [row["problem"] for row in kept[::4]] == rows, "without shuffling a row's number is its place"
        rewards, found = (np.reshape([row[name] for row in kept], (BATCH, 4)) for name in ("reward", "advantage"))
        np.testing.assert_allclose(found, tunix_like.compute_advantages(rewards, "maxrl"), rtol=1e-5, atol=1e-6)
    assert Watched(tmp_path).train(ROWS, shuffle=False).numbers == [], "what is finished draws nothing more"
    with pytest.raises(UserError, match="schedule: 'cosine' needs the number of updates.*set training.max_steps"):
        Watched(schedule="cosine").train(ROWS)


DATA = {
    "grain": lambda: grain.MapDataset.source(ROWS),
    "iterable": lambda: itertools.chain(*[ROWS] * 4),
}


def without_times(rows):
    return [{k: v for k, v in row.items() if "time" not in k and "perf" not in k} for row in rows]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Returns an uninterrupted run of six steps, and its folder."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, Watched(folder, max_steps=6).train(DATA["grain"](), shuffle=False)


@pytest.mark.slow
@pytest.mark.parametrize("kind", DATA)
def test_resumed_run_equals_the_uninterrupted_run(kind, tmp_path, whole):
    """The run stops after steps 1 and 4 of 6, and is resumed by a new learner on new data each time. Sampled rows,
    weights, metrics and rollouts are bitwise those of the uninterrupted run."""
    folder, whole = whole
    drawn = [row["train/dynamic_sampling/extra_batches"] + 1 for row in whole.rows]
    assert len({*np.cumsum(drawn) / np.arange(1, 7)}) > 3, (
        "the place in the data does not follow from the step's number"
    )
    numbers, trained = [], []
    for stop in (1, 4, 6):
        part = Watched(tmp_path, max_steps=stop).train(DATA[kind](), shuffle=False)
        numbers, trained = numbers + part.numbers, trained + part.trained
    assert numbers == whole.numbers == list(range(BATCH * int(sum(drawn))))
    assert trained == whole.trained
    jax.tree.map(np.testing.assert_array_equal, part.params(), whole.params())
    one, two = metric_rows(folder), metric_rows(tmp_path)
    assert without_times(one) == without_times(two) and len(one) == 6
    for step in range(1, 7):
        name = f"rollouts/step_{step:06d}.jsonl"
        assert (folder / name).read_text() == (tmp_path / name).read_text()
