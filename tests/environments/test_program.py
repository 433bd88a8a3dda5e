"""Tests programs as agents: real processes, which use the clients of OpenAI and Anthropic or plain HTTP."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from tests.environments.programs import functions
from tests.environments.programs.clients import RESULT, SCHEMA
from tests.environments.test_pool import running, until
from tests.environments.test_verifiers import END, TOKENIZER, ids, turn
from tests.environments.test_verifiers import served as engine_of_server
from tests.parameters import others_slow
from tests.serving import served
from tests.serving.conversations import THOUGHT_AND_CALL, template
from tests.tiny_model import HF
from tests.training.small_learner import assert_same, collect, make, params_of
from tunix_like import Program, RLOOConfig, RLOOLearner, UserError, load_model, turn_advantages
from tunix_like.config.load import load
from tunix_like.config.schema import EnvironmentConfig, MeshConfig, RolloutConfig
from tunix_like.environments.arguments import make_player
from tunix_like.environments.kinds import environments_of
from tunix_like.models.sharding import build_mesh
from tunix_like.rewards import per_turn
from tunix_like.runtime.moment import moment_of
from tunix_like.storage.metrics import rows as metric_rows
from tunix_like.types import Problem, Turn
from tunix_like.workers.process import children_of

PROGRAMS = Path(__file__).with_name("programs")
HOSTILE = ["python", str(PROGRAMS / "hostile.py")]
CLIENTS = ["python", str(PROGRAMS / "clients.py")]
ROLLOUT = RolloutConfig(max_prompt_length=16, max_tokens_to_generate=400)
needs_openai = pytest.mark.skipif(importlib.util.find_spec("openai") is None, reason="async agents need openai")


@pytest.fixture
def opened():
    """`opened(program, rows)` starts trajectories of rows, which have the prompt "ab"."""
    made = []

    def begin(program, rows, size=1, tokenizer=TOKENIZER, max_turns=3, rollout=ROLLOUT, **settings):
        given = {"timeout_seconds": 60.0, **settings}
        environments = program if isinstance(program, Program) else Program(program, **given)
        made.append(environments)
        player = make_player(environments, EnvironmentConfig(max_turns=max_turns), tokenizer, rollout)
        assert player is not None
        moment = moment_of(3, 2, 4)
        problems = [Problem(n, "", TOKENIZER.encode("ab"), row, "ab", moment=moment) for n, row in enumerate(rows)]
        return player.start(problems, size, 16)

    yield begin
    for each in made:
        each.close()


def play(trajectories, text="ba"):
    """Answers every request with the same turn. Returns the episodes."""
    left = [(group, sample) for group in range(len(trajectories.problems)) for sample in range(trajectories.size)]
    while left:
        trajectories.submit([turn(text, sample, group) for group, sample in left])
        left = [reply[:2] for reply in trajectories.replies(wait=True) if reply.tokens is not None]
    return trajectories.episodes()


@pytest.mark.parametrize("stream", others_slow([False, True], True), ids=["whole", "stream"])
@pytest.mark.parametrize("protocol", ["chat", "responses", "messages"])
def test_a_tool_loop_keeps_the_sampled_tokens(opened, protocol, stream):
    """The oracle is the rendering of the same conversation."""
    pytest.importorskip("anthropic" if protocol == "messages" else "openai")
    _, tokenizer = served.speaker(THOUGHT_AND_CALL, template())
    tools = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]
    render = lambda messages: tokenizer.with_template_variables({"tools": tools}).encode_prompt(messages, True)[1]  # noqa: E731
    messages = [{"role": "user", "content": "2 + 3?"}]
    prompt = render(messages)
    row = {"protocol": protocol, "stream": stream, "tools": True, "turns": 3, "question": "2 + 3?", "size": len(prompt)}
    rollout = RolloutConfig(max_prompt_length=16, max_tokens_to_generate=4000)
    trajectories = opened(CLIENTS, [row], tokenizer=tokenizer, rollout=rollout)
    assert [*trajectories.problems[0].tokens, *trajectories.opening(0, 0)] == prompt
    sampled = [
        *(tokenizer.encode(word, add_special_tokens=False)[0] for word in THOUGHT_AND_CALL),
        tokenizer.eos_ids[0],
    ]
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
    content = "".join(THOUGHT_AND_CALL).partition("\n<tool_call>")[0]
    seen = list(prompt)
    for _ in range(2):
        trajectories.submit([Turn(0, 0, sampled, truncated=False)])
        (reply,) = trajectories.replies(wait=True)
        assert reply.tokens is not None, trajectories.episodes()
        messages += [
            {"role": "assistant", "content": content, "tool_calls": [call]},
            {"role": "tool", "content": RESULT},
        ]
        assert not reply.restart and render(messages) == [*seen, *sampled, *reply.tokens]
        seen += [*sampled, *reply.tokens]
    trajectories.submit([Turn(0, 0, [*sampled[:3], sampled[-1]], truncated=False)])
    assert trajectories.replies(wait=True)[0].tokens is None
    (episode,) = trajectories.episodes()
    thought = "" if protocol != "chat" else "<think>\nhm\n</think>\n\n"
    assert episode.failure is None and episode.reward == len(f"{thought}Let me add.") and episode.rewritten == 0


@needs_openai
def test_other_conversations_are_segments_in_order_of_arrival(opened):
    """Two requests at once: the second is answered after the first, as a segment of its own."""
    trajectories = opened(functions.both, [{}], arguments={"second": "cd"})
    shared = trajectories.problems[0].tokens
    assert shared == ids("ab")[:1]
    texts = {tuple(ids("ab")): "ba", tuple(ids("cd")): "hhh"}
    first = tuple([*shared, *trajectories.opening(0, 0)])
    trajectories.submit([turn(texts.pop(first))])
    (reply,) = trajectories.replies(wait=True)
    assert reply.restart
    trajectories.submit([turn(texts.pop(tuple([*shared, *reply.tokens])))])
    assert trajectories.replies(wait=True)[0].tokens is None
    (episode,) = trajectories.episodes()
    assert episode.failure is None and episode.reward == 2 + 30 and episode.rewritten == 1


@pytest.mark.parametrize("one_conversation", [False, True])
def test_first_requests_may_differ_within_a_row(opened, tmp_path, one_conversation):
    """With `one_conversation`, they may not, and are the prompt that the trajectories of the row share."""
    rows = [{"fault": "differs", "folder": str(tmp_path)}]
    trajectories = opened(HOSTILE, rows, size=2, one_conversation=one_conversation)
    shared = trajectories.problems[0].tokens
    requests = [[*shared, *trajectories.opening(0, sample)] for sample in range(2)]
    episodes = play(trajectories)
    if one_conversation:
        assert requests[0] == requests[1] and requests[0] in (ids("ab"), ids("cd"))
        assert [each.failure and "differs from those" in each.failure[1] for each in episodes] == [None, True]
    else:
        assert shared == ids("ab")[:1] and sorted(requests) == sorted([ids("ab"), ids("cd")])
        assert [each.reward for each in episodes] == [200, 200]


@needs_openai
def test_an_async_function_gets_a_client_and_the_row(opened):
    rows = [{"does": name} for name in ("reward", "nothing", "error", "exit")]
    scored, without, failed, left = play(opened(functions.agent, rows), "hhh")
    assert [each.reward for each in (scored, without)] == [3.0, 0.0]
    assert failed.failure[0] == "error" and "ended with status 1" in failed.failure[1]
    assert "before the error" in failed.failure[1] and "KeyError: 'no such key'" in failed.failure[1]
    assert "ended with status 4" in left.failure[1]


FAULTS = {
    "foreign_key": 401_200,
    "giant_body": 413_413_200,
    "no_json": 4 * 400 + 200 * 10_000,
    "no_route": 404_200,
    "strangers": 200,
    "words": 0,
    "background": 1,
    "noise": 1,
    "status_after_the_limit": 0,
    "crash": "error: the program was killed by signal 6 (Aborted). The last line of its output: the last words",
    "status": "ended with status 3. The last line of its output: no more ideas\nIts last output was:\nno more ideas",
    "wrong_reward": "the program's last line: reward 'high' is not a number",
    "infinite_reward": "reward nan is not a finite number",
    "odd_text": "cannot be encoded",
    "no_request": "the program has ended without a request to the model.",
    "kills_its_group": "its process was killed by signal 9",
}
"""The reward that a fault leaves, or a part of the failure that makes its trajectory unscored."""


def test_faults_concern_only_their_trajectory(opened):
    faults = list(FAULTS)
    trajectories = opened(HOSTILE, [{"fault": fault} for fault in faults], workers=4)
    episodes = play(trajectories)
    for fault, episode in zip(faults, episodes, strict=True):
        expected = FAULTS[fault]
        if isinstance(expected, str):
            assert episode.failure is not None and np.isnan(episode.reward), fault
            assert expected in f"{episode.failure[0]}: {episode.failure[1]}", fault
        else:
            assert (episode.failure, episode.reward) == (None, expected), fault
    assert episodes[faults.index("status_after_the_limit")].limited
    environments = trajectories.environments()
    assert environments[faults.index("words")].output == '{"reward": 5}\nall done\n'


@pytest.mark.parametrize("fault", ["silence", "late_silence"])
def test_a_silent_program_ends_at_the_deadline_with_its_last_output(opened, fault):
    start = time.monotonic()
    (episode,) = play(opened(HOSTILE, [{"fault": fault}], timeout_seconds=1.5))
    assert time.monotonic() - start < 12
    kind, reason = episode.failure
    assert kind == "timeout" and "within environment.timeout_seconds=1.5" in reason and "about to think" in reason


def test_a_program_above_the_memory_limit_is_stopped(opened):
    (episode,) = play(opened(HOSTILE, [{"fault": "memory"}], memory_gb=0.3))
    assert episode.failure[0] == "error" and "used more than environment.memory_gb=0.3 GB" in episode.failure[1]


def test_the_key_of_a_trajectory_opens_no_other(opened, tmp_path):
    rows = [{"fault": "other_trajectory", "folder": str(tmp_path)}]
    assert [each.reward for each in play(opened(HOSTILE, rows, size=2))] == [401_200, 401_200]


def test_processes_that_a_program_leaves_are_killed(opened, tmp_path):
    (episode,) = play(opened(HOSTILE, [{"fault": "double_fork", "folder": str(tmp_path)}]))
    assert episode.reward == 1.0
    assert until(lambda: not running(int((tmp_path / "pid").read_text())))


@pytest.mark.parametrize("count", others_slow([200, 10_000], 200))
@pytest.mark.parametrize("fault", ["many_requests", "many_at_once"])
def test_many_requests_are_refused_after_the_limit(opened, fault, count):
    trajectories = opened(HOSTILE, [{"fault": fault, "count": count}], max_turns=2)
    (episode,) = play(trajectories)
    assert (episode.turns, episode.limited, episode.reward, episode.failure) == (2, True, 2.0, None)


def test_a_request_that_was_broken_off_is_not_answered(opened, tmp_path):
    trajectories = opened(HOSTILE, [{"fault": "gone", "folder": str(tmp_path)}])
    (tmp_path / "asked").touch()  # the first request is here
    assert until(lambda: (tmp_path / "closed").exists())
    (episode,) = play(trajectories)
    assert (episode.turns, episode.reward) == (1, 1.0)


def test_truncated_turns_end_the_trajectory(opened):
    trajectories = opened(HOSTILE, [{"fault": "status_after_the_limit"}])
    trajectories.submit([turn("ba", end=False)])
    (episode,) = trajectories.episodes()
    assert (episode.failure, episode.reward, episode.turns) == (None, 0.0, 1)


def test_the_row_has_the_prompt_and_no_gold_columns(opened, tmp_path):
    line = f"cd {tmp_path} && cp $TUNIX_LIKE_ROW row.json && echo $TUNIX_LIKE_ROW > place"
    row = {"word": "x", "answer": "gold", "hidden": 3, "gold": 4, "numbers": np.arange(2)}
    seen = []
    for columns in (None, ["answer"]):
        (episode,) = play(opened(line, [row], columns=columns))
        assert "without a request" in episode.failure[1]
        seen.append(json.loads((tmp_path / "row.json").read_text()))
        assert not Path((tmp_path / "place").read_text().strip()).exists()
    assert seen == [{"word": "x", "numbers": [0, 1], "prompt": "ab"}, {"answer": "gold", "prompt": "ab"}]


def test_a_command_gets_step_and_progress_as_variables(opened, tmp_path):
    line = f"echo $TUNIX_LIKE_STEP $TUNIX_LIKE_PROGRESS > {tmp_path}/moment"
    play(opened(line, [{}]))
    assert (tmp_path / "moment").read_text() == "3 0.5\n"


@needs_openai
def test_a_function_gets_step_and_progress_by_name(opened):
    (episode,) = play(opened(functions.asking, [{}]))
    assert (episode.failure, episode.reward) == (None, 3.5)
    (episode,) = play(opened(functions.asking, [{}], arguments={"step": 10}))
    assert episode.reward == 10.5, "an argument of the config stays"


def config(tmp_path, environment):
    (tmp_path / "run.yaml").write_text(json.dumps({"data": {"name": "calculator"}, "environment": environment}))
    return load(str(tmp_path / "run.yaml"), [])


AGENT = f"{PROGRAMS / 'functions.py'}:"


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"name": "program"}, "environment.arguments: 'program' needs a value for command; set"),
        ({"name": "program", "arguments": {"command": ["no-such-agent", "x"]}}, "there is no command 'no-such-agent'"),
        ({"name": "program", "arguments": {"command": "no-such-agent"}}, "there is no command 'no-such-agent'"),
        ({"name": "program", "arguments": {"command": [1]}}, "environment.arguments.command: got [1]; give a list of"),
        (
            {"name": "program", "arguments": {"command": "x", "shell": True}},
            "'program' has no parameter 'shell'; it has",
        ),
        ({"name": "program", "arguments": {"command": "ls"}, "history": "template"}, "environment.history: "),
        ({"name": "program", "arguments": {"command": "ls"}, "workers": 0}, "environment.workers: got 0"),
        pytest.param(
            {"name": AGENT + "both", "arguments": {"third": "a"}},
            "environment.arguments: 'both' has no parameter 'third'",
            marks=needs_openai,
        ),
        ({"name": AGENT + "agent", "history": "template"}, "environment.history: "),
    ],
)
def test_mistakes_are_found_before_the_run(tmp_path, environment, message):
    with pytest.raises(UserError) as error:
        environments_of(config(tmp_path, environment))
    assert message in str(error.value) and "\n" not in str(error.value)


@needs_openai
def test_a_config_makes_programs_of_commands_and_functions(tmp_path, monkeypatch):
    given = {"workers": 3, "timeout_seconds": 7.0, "memory_gb": 2.0}
    for kind in (
        {"name": "program", "arguments": {"command": "ls"}},
        {"name": AGENT + "both", "arguments": {"second": "cd", "columns": ["answer"], "one_conversation": True}},
    ):
        made = environments_of(config(tmp_path, kind | given))
        assert isinstance(made, Program)
        assert {name: getattr(made, name) for name in given} == given
    assert made.one_conversation
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="needs openai; run pip install openai"):
        environments_of(config(tmp_path, {"name": AGENT + "agent"}))


@needs_openai
def test_a_function_must_be_async_and_importable():
    with pytest.raises(UserError, match="'plain': an agent is a command or an async function; write async def"):
        Program(functions.plain)

    async def inner(client, row):
        pass

    with pytest.raises(UserError, match="'inner' cannot run in a worker.*or write it as a program of its own"):
        make_player(inner, None, TOKENIZER, ROLLOUT)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("no_such_agent x", "ended with status 127. The last line of its output: /bin/sh"),
        (["python", "-c", "import no_such_package"], "No module named 'no_such_package'"),
        (["python", "-c", "pass"], "the program has ended without a request to the model. It printed nothing."),
    ],
)
def test_a_program_is_tried_before_the_run(command, message):
    program = Program(command, timeout_seconds=60.0)
    player = make_player(program, EnvironmentConfig(), TOKENIZER, ROLLOUT)
    with pytest.raises(UserError) as error:
        player.check([{"prompt": "ab"}], 16)
    assert message in str(error.value) and "\n" not in str(error.value)
    program.close()


def test_the_trial_leaves_no_process(tmp_path):
    program = Program(HOSTILE, timeout_seconds=60.0)
    player = make_player(program, EnvironmentConfig(), TOKENIZER, ROLLOUT)
    player.check([{"prompt": "ab", "fault": "words"}], 16)
    folder = Path(program._folder.name)
    assert not list(folder.iterdir())
    assert until(lambda: not list(children_of(program._pool._server.pid)))
    small = make_player(program, EnvironmentConfig(), TOKENIZER, RolloutConfig(max_tokens_to_generate=3))
    with pytest.raises(UserError, match="rollout.max_tokens_to_generate=2 allows; raise it"):
        small.check([{"prompt": "ab", "fault": "words"}], 16)
    program.close()
    assert not folder.exists() and not os.path.exists(folder)


LETTERS = {"model": HF | {"vocab_size": TOKENIZER.vocab_size}, "data": [{"prompt": "ab", "n": n} for n in range(4)]}


def model_and_rollout():
    model = load_model(LETTERS["model"], init="random", seed=0)[0]
    ends = [END, *range(6, 10)]  # a random model ends its turns early
    return model, RolloutConfig(max_prompt_length=16, max_tokens_to_generate=48, eos_tokens=ends)


def learner_of(program, **settings):
    model, rollout = model_and_rollout()
    return make(reward=(), tokenizer=TOKENIZER, environment=program, model=model, rollout=rollout, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("one_conversation", [False, True])
def test_the_trained_tokens_are_those_that_the_programs_got(one_conversation):
    """The trainer computes the log-probabilities of the sampler: a token that is changed on its way through a client
    would have another one. Some rows are continued and some have several segments."""
    row = {"prompt": "ab", "protocol": "chat", "stream": True, "tools": False, "turns": 3, "question": "ab"}
    program = Program(CLIENTS, timeout_seconds=120.0, one_conversation=one_conversation)
    learner = learner_of(program, max_logprob_gap=1e-4, environment_config=EnvironmentConfig(max_turns=4))
    rows = collect(learner, [row | {"n": n} for n in range(4)])
    program.close()
    assert all(each["train/logprob_gap/max"] < 1e-4 for each in rows)
    assert all(each["train/reward/unscored_frac"] == 0 for each in rows)
    assert max(each["train/turns/mean"] for each in rows) > 1 and max(each["train/grad_norm"] for each in rows) > 0
    assert max(each["train/turns/rewritten"] for each in rows) > 0


@pytest.mark.slow
@pytest.mark.parametrize("where", ["local", "mesh", "vllm"])
def test_turns_of_programs_are_credited(where, tmp_path):
    """The oracle reads the rewards of the turns from the rollout file. Trajectories have several segments."""

    def letters(completions, conversation):
        return [float(sum(map(ord, text)) % 3) for text in completions]

    row = {"prompt": "ab", "protocol": "chat", "stream": False, "tools": False, "turns": 2, "question": "ab"}
    program = Program(CLIENTS, timeout_seconds=120.0)
    model, rollout = model_and_rollout()
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(engine_of_server(model, rollout, tmp_path)) if where == "vllm" else None
        mesh = build_mesh(MeshConfig(shape=[8, 1])) if where == "mesh" else None
        made = make(
            RLOOConfig(num_generations=2, credit="turn"), learner=RLOOLearner, reward=[per_turn(letters)], model=model,
            tokenizer=TOKENIZER, environment=program, rollout=rollout, engine=engine, mesh=mesh, max_logprob_gap=1e-4,
            max_steps=1, environment_config=EnvironmentConfig(max_turns=4), output_dir=str(tmp_path / "run"),
        )  # fmt: skip
        prompts = 8 if where == "mesh" else 4
        found = collect(made, [row | {"n": n} for n in range(prompts)], batch_size=prompts)[-1]
    program.close()
    assert found["train/logprob_gap/max"] < 1e-4 and found["train/grad_norm"] > 0
    text = (tmp_path / "run" / "rollouts" / "step_000001.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    for start in range(0, len(rows), 2):
        members = rows[start : start + 2]
        expected = turn_advantages([each["turn_rewards"] for each in members])
        for each, advantages in zip(members, expected, strict=True):
            np.testing.assert_allclose(each["turn_advantages"], advantages, atol=1e-5)
    assert max(len(each["turn_rewards"]) for each in rows) > 1 and max(len(each["segments"]) for each in rows) > 1


@pytest.mark.slow
def test_a_resumed_run_repeats_bit_for_bit(tmp_path):
    """The oracle is an uninterrupted run."""

    def train(folder):
        program = Program(functions.agent, timeout_seconds=120.0)
        learner = learner_of(
            program, max_steps=4, output_dir=str(folder), checkpoint_every_n_steps=1, max_checkpoints_to_keep=4
        )
        collect(learner, LETTERS["data"])
        program.close()
        return [row["train/grad_norm"] for row in metric_rows(folder)], params_of(learner.model)

    norms, whole = train(tmp_path / "whole")
    assert len(set(norms)) == 4
    shutil.copytree(tmp_path / "whole", tmp_path / "part")
    for step in (3, 4):
        shutil.rmtree(tmp_path / "part" / "checkpoints" / str(step))
    again, end = train(tmp_path / "part")
    assert again == norms
    assert_same(end, whole)


@pytest.mark.slow
def test_64_programs_at_once(opened):
    """All wait for the policy at the same time; each gets the answer to its own request."""
    rows = [{"fault": "own_answer", "length": 1 + n % 5} for n in range(64)]
    trajectories = opened(HOSTILE, rows, timeout_seconds=120.0)
    trajectories.submit([turn("h" * (1 + n % 7), 0, n) for n in range(64)])
    replies = {reply.group: reply for reply in trajectories.replies(wait=True)}
    assert len(replies) == 64
    trajectories.submit([turn("a", 0, n) for n in range(64)])
    assert all(reply.tokens is None for reply in trajectories.replies(wait=True))
    assert [each.reward for each in trajectories.episodes()] == [1 + n % 7 + 10 * (1 + n % 5) for n in range(64)]
