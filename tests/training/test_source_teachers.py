"""Tests teachers of data sources: each row has the advantages and the gradient of a run with its teacher alone."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import tunix_like
from tests.rollout.engines.stand_in import StandIn
from tests.tiny_model import HF
from tunix_like import (
    DistillationConfig,
    DistillationLearner,
    MaxRLConfig,
    RolloutConfig,
    TeacherConfig,
    UserError,
)
from tunix_like.cli import main as cli
from tunix_like.config.load import load
from tunix_like.config.sources import teachers_of
from tunix_like.models.decoder import Decoder
from tunix_like.models.loading import export_model
from tunix_like.planning.sizes import described_companions
from tunix_like.runs.build import assemble
from tunix_like.storage.metrics import rows as metric_rows
from tunix_like.training import token_signals

from .repeated_prompts import difference
from .small_learner import ROWS, TOKENIZER, collect, make, make_model, params_of

LABELS = ["a", "b", "none", None, "b", "a", "a", "none"]
LABELLED = [row | ({} if label is None else {"data_source": label}) for row, label in zip(ROWS, LABELS, strict=True)]
WIDE = HF | {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3, "num_key_value_heads": 1}


def other_model():
    """Returns a teacher of another width and depth than the policy, and with padding of the vocabulary."""
    return tunix_like.load_model(WIDE | {"vocab_size": HF["vocab_size"] + 3}, init="random", seed=5)[0]


def taught(caught, settings=None, rows=LABELLED, **arguments):
    """Returns a learner whose rewards are equal in each group, and trains it for one step on all rows in their order.
    The advantages of tokens are added to the list `caught`."""
    constant = lambda prompts, completions, **columns: [1.0] * len(completions)  # noqa: E731
    made = make(
        arguments.pop("algo", MaxRLConfig(num_generations=4)), reward=arguments.pop("reward", constant), max_steps=1,
        teacher_config=TeacherConfig(**{"coef": 0.7} | (settings or {})), **arguments,
    )  # fmt: skip
    teacher_signals = token_signals.teacher_signals

    def watched(*given):
        signals = teacher_signals(*given)
        caught.append((signals.unlogged, signals.metrics))
        return signals

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_signals, "teacher_signals", watched)
        collect(made, rows, batch_size=len(rows), shuffle=False)
    return made


@pytest.fixture(scope="module")
def alone():
    """The advantages of tokens of runs in which one model teaches all rows."""
    caught = []
    for model in (make_model(3), other_model()):
        taught(caught, teacher=model)
    return [values for values, _ in caught]


def rows_of(label):
    return [place for place, each in enumerate(LABELS) if each == label]


def check_advantages(found, alone, default):
    """Compares with runs of one teacher: "a" has the first, "b" the second, and other rows `default` (None: 0)."""
    expected = np.zeros_like(found) if default is None else alone[default].copy()
    for number, label in enumerate(("a", "b")):
        expected[rows_of(label)] = alone[number][rows_of(label)]
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(found, expected, atol=2e-6)
    np.testing.assert_array_equal(found == 0, expected == 0)


@pytest.mark.slow
def test_rows_have_the_advantages_of_the_teacher_of_their_source(alone):
    assert np.abs(alone[0] - alone[1]).max() > 0.1
    models = {"a": make_model(3), "b": other_model()}
    caught = []
    made = taught(caught, source_teachers=models)
    check_advantages(caught[0][0], alone, None)
    taught(caught, source_teachers={"b": models["b"]}, teacher=models["a"])
    check_advantages(caught[1][0], alone, 0)
    assert made.companions.teachers == tuple(teacher.work for teacher in made.teachers.by_source.values())
    metrics = caught[0][1]
    tokens = caught[0][0][caught[0][0] != 0]
    assert metrics["teacher/divergence"] == pytest.approx(-tokens.mean() / 0.7, rel=1e-5)


@pytest.mark.slow
def test_the_gradient_is_the_mean_of_those_of_the_sources():
    """Compares one step of gradient descent with those of runs of one teacher, in which only the completions of its
    source are scored: the aggregation is a mean over scored completions."""
    models = {"a": make_model(3), "b": other_model()}
    algo = MaxRLConfig(num_generations=4, loss_agg_mode="seq-mean-token-sum")
    start = params_of(make_model())

    def step(label, **teachers):
        def score(prompts, completions, data_source, **columns):
            return [1.0 if label in (None, source) else None for source in data_source]

        made = taught([], algo=algo, reward=score, **teachers)
        return jax.tree.map(np.subtract, jax.tree.map(np.asarray, made.params), start)

    found = step(None, source_teachers=models)
    apart = [step(label, teacher=model) for label, model in models.items()]
    assert difference(*apart) > 0.1
    parts = [len(rows_of(label)) / len(LABELS) for label in models]
    assert difference(found, jax.tree.map(lambda a, b: parts[0] * a + parts[1] * b, *apart)) < 1e-5


@pytest.mark.slow
def test_a_batch_without_taught_rows_changes_nothing():
    caught = []
    made = taught(caught, source_teachers={"elsewhere": make_model(3)})
    assert not caught[0][0].any() and caught[0][1] == {}
    jax.tree.map(np.testing.assert_array_equal, params_of(make_model()), jax.tree.map(np.asarray, made.params))


def test_only_taught_rows_need_the_columns_of_the_teachers_prompt(alone):
    """The prompt reads the column `hint`, which other rows lack. With an empty hint it is that of the policy."""
    rows = [row | ({"hint": ""} if row.get("data_source") in ("a", "b") else {}) for row in LABELLED]
    caught = []
    models = {"a": make_model(3), "b": other_model()}
    taught(caught, {"prompt": "{prompt}{hint}"}, rows, source_teachers=models)
    check_advantages(caught[0][0], alone, None)


@pytest.mark.slow
def test_a_server_can_be_the_teacher_of_a_source(alone, tmp_path):
    export_model(make_model(3), TOKENIZER, tmp_path)
    server = StandIn(tmp_path, TOKENIZER)
    caught = []
    try:
        made = taught(caught, source_teachers={"a": server.url, "b": other_model()})
        with pytest.raises(UserError, match=f"data source 'b': teacher: the server {server.url} cannot be used"):
            server.tokens_of = lambda text: [1, 2, 3]
            taught([], source_teachers={"b": server.url})
    finally:
        server.stop()
    check_advantages(caught[0][0], alone, None)
    assert len(made.companions.teachers) == 1


def test_sources_share_a_model():
    model = make_model(3)
    made = make(teacher=model, source_teachers={"a": model, "b": other_model(), "c": model})
    assert made.teachers.by_source["a"] is made.teachers.by_source["c"] is made.teachers.default
    assert len(made.teachers.distinct) == len(made.companions.teachers) == 2


@pytest.mark.slow
def test_a_resumed_run_has_the_same_teachers(tmp_path):
    def train(**models):
        return taught([], output_dir=str(tmp_path), source_teachers=models)

    train(a=make_model(3), b=other_model())
    with pytest.raises(UserError, match=r"Different settings.*\n.*source_teachers\.b"):
        train(a=make_model(3), b=make_model(3))
    with pytest.raises(UserError, match=r"Different settings.*\n.*source_teachers"):
        train(a=make_model(3))


WARM = RolloutConfig(max_prompt_length=8, max_tokens_to_generate=4, temperature=0.7)
MISTAKES = {
    "no teacher of a row": (
        {"source_teachers": {"a": 3, "b": 3}},
        "data source 'none': training row 2: the estimator 'distillation' has no rewards, so it needs a teacher",
    ),
    "no teacher of a source": (
        {"source_estimators": {"b": {"advantage_estimator": "distillation"}}, "source_teachers": {"a": 3}},
        "data source 'b': training row 1: the estimator 'distillation' has no rewards",
    ),
    "jsd": ({"source_teachers": {"a": 3}, "settings": {"divergence": "jsd"}}, "teacher.divergence: jsd runs inside"),
    "a path": ({"source_teachers": {"a": "folder"}}, "data source 'a': teacher: give the model of 'folder' itself"),
    "self": ({"source_teachers": {"a": "self"}}, "teacher.prompt: data source 'a': teacher=self needs"),
    "vocabulary": ({"source_teachers": {"a": "small"}}, "data source 'a': teacher: it has a vocabulary of 11 tokens"),
    "a temperature": (
        {"source_teachers": {"a": "http://127.0.0.1:1"}, "rollout": WARM},
        "rollout.temperature: got 0.7; a teacher on a server .data source 'a': teacher. gives",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_rejected_before_any_compilation(name):
    arguments, message = MISTAKES[name]
    arguments = dict(arguments)
    models = {3: make_model, "small": lambda: tunix_like.load_model(HF | {"vocab_size": 11}, init="random")[0]}
    given = arguments["source_teachers"].items()
    arguments["source_teachers"] = {source: models[each]() if each in models else each for source, each in given}
    settings = TeacherConfig(**arguments.pop("settings", {}))
    rewarded = "source_estimators" in arguments
    algo = MaxRLConfig(num_generations=4) if rewarded else DistillationConfig(num_generations=4)
    kinds = {} if rewarded else {"learner": DistillationLearner, "reward": ()}
    with pytest.raises(UserError, match=message):
        made = make(algo, teacher_config=settings, **kinds, **arguments)
        made.step = None  # no step runs
        made.train(LABELLED, batch_size=4)


def test_rows_of_a_stream_are_checked_when_they_are_drawn():
    made = make(
        DistillationConfig(num_generations=4), learner=DistillationLearner, reward=(),
        source_teachers={"a": make_model(3), "b": make_model(3)}, max_steps=1,
    )  # fmt: skip
    with pytest.raises(UserError, match="data source 'none': prompt 'ef>': the estimator 'distill"):
        collect(made, iter(LABELLED))


# --- configurations ---------------------------------------------------------------------------------------------------


RUN = """
model: {path: policy}
data: {name: mix, batch_size: 8}
algorithm: {advantage_estimator: maxrl, num_generations: 2}
rollout: {max_prompt_length: 8, max_tokens_to_generate: 4}
eval: {samples: 2, k: [1]}
"""


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Three models in the working folder."""
    monkeypatch.chdir(tmp_path)
    export_model(make_model(), TOKENIZER, tmp_path / "policy")
    export_model(make_model(3), TOKENIZER, tmp_path / "first")
    export_model(tunix_like.load_model(WIDE, init="random", seed=5)[0], TOKENIZER, tmp_path / "second")
    (tmp_path / "run.yaml").write_text(RUN)
    return tmp_path


def mixed(*teachers, keys=()):
    """Returns the config of a mix with a source of reversed text for each of the paths (None: no own teacher)."""
    own = ("" if path is None else f", teacher: {path}" for path in teachers)
    entries = [
        f"{{name: reverse_text, label: s{i}, train_size: 8, eval_size: 1{given}}}" for i, given in enumerate(own)
    ]
    return ["run.yaml", f"data.sources=[{', '.join(entries)}]", *keys]


def config_of(*teachers, keys=()):
    path, *overrides = mixed(*teachers, keys=keys)
    return load(path, overrides)


def test_entries_of_a_mix_name_their_teachers(folders):
    config = config_of("first", None, "second", "first", keys=["teacher.coef=0.5"])
    found = [(each.key, each.settings.path, each.sources) for each in teachers_of(config)]
    assert found == [
        ("data.sources[0].teacher", "first", ("s0", "s3")),
        ("data.sources[2].teacher", "second", ("s2",)),
    ]
    assert all(each.settings.coef == 0.5 for each in teachers_of(config))
    parts = assemble(config)
    assert parts.teacher is None and list(parts.source_teachers) == ["s0", "s3", "s2"]
    assert parts.source_teachers["s0"] is parts.source_teachers["s3"]
    assert parts.source_teachers["s2"].config.hidden_size == WIDE["hidden_size"]
    works = described_companions(config, parts.model, None).teachers
    assert [work.model.hidden_size for work in works] == [HF["hidden_size"], WIDE["hidden_size"]]
    default = config_of("second", None, "first", keys=["teacher.path=first"])
    found = [(each.key, each.sources) for each in teachers_of(default)]
    assert found == [("teacher.path", ("s1", "s2")), ("data.sources[0].teacher", ("s0",))]
    both = assemble(default)
    assert isinstance(both.teacher, Decoder) and list(both.source_teachers) == ["s0"]


WRONG = {
    "distillation": (
        ["first", None], ["algorithm.advantage_estimator=distillation"],
        r"data.sources\[1\].teacher: the estimator 'distillation' has no rewards",
    ),
    "jsd": (["first", None], ["teacher.divergence=jsd"], r"teacher.divergence: jsd .* \(data.sources\[\].teacher\)"),
    "no row": (["first", "second"], ["teacher.path=policy"], "teacher.path: every entry of data.sources has its own"),
    "pairs": ([None, "first"], ["algorithm.advantage_estimator=dpo"], r"data.sources\[1\].teacher: dpo trains on"),
    "quantised server": (
        [None, "'http://127.0.0.1:1'"], ["teacher.quantize=int8"],
        r"teacher.quantize: data.sources\[1\].teacher is a server",
    ),
    "temperature": (
        [None, "'http://127.0.0.1:1'"], ["rollout.temperature=0.5"], r"on a server \(data.sources\[1\].teacher",
    ),
    "no folder": ([None, "nowhere"], [], r"nowhere: no such folder.*as data.sources\[1\].teacher"),
    "vocabulary": ([None, "small"], [], r"data.sources\[1\].teacher: it has a vocabulary of 11 tokens"),
    "positions": (
        ["first", "short"], [], r"data.sources\[1\].teacher: rollout.max_prompt_length .* has 8 positions",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_name_the_key(name, folders):
    teachers, keys, message = WRONG[name]
    for folder, change in (("small", {"vocab_size": 11}), ("short", {"max_position_embeddings": 8})):
        if folder in teachers:
            export_model(tunix_like.load_model(HF | change, init="random")[0], TOKENIZER, folders / folder)
    with pytest.raises(UserError, match=message):
        assemble(config_of(*teachers, keys=keys), abstract=True)


NAMED = (("first", "s0"), ("second", "s1"))


@pytest.mark.slow
def test_the_command(folders, capsys):
    """A dry run counts every teacher. A run trains with both, and resumes only with them."""
    keys = ["algorithm.advantage_estimator=distillation", "training.max_steps=1", "training.output_dir=run"]
    command = ["train", *mixed("first", "second", keys=keys)]
    assert cli.main([*command, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert all(f"teacher: {path}, reverse_kl, coef 1, for {source}" in said for path, source in NAMED)
    assert cli.main(command) == 0
    capsys.readouterr()
    assert cli.main(["train", *mixed("first", "first", keys=[*keys, "training.max_steps=2"])]) == 2
    said = capsys.readouterr().err
    assert "source_teachers" in said or "data.sources" in said
    (row,) = [row for row in metric_rows("run") if "train/loss" in row]
    assert row["train/teacher/divergence"] != 0
