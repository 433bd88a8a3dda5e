"""Tests environments of the package `verifiers`: the conversion of requests to tokens and of turns to answers with a
stand-in for its process, and runs with the real package if it is installed."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import itertools
import json
import queue
import time
import types
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.process import ROOT
from tests.rollout.engines.stand_in import StandIn
from tests.tiny_model import HF
from tests.training.small_learner import collect, make
from tunix_like import load_model, run
from tunix_like.config.load import load
from tunix_like.config.schema import EnvironmentConfig, RolloutConfig
from tunix_like.data import load_source
from tunix_like.environments.agent_calls import Call, answer_of
from tunix_like.environments.arguments import make_player
from tunix_like.environments.chat_messages import RequestError
from tunix_like.environments.kinds import environments_of, kind_of
from tunix_like.environments.trajectories import Trajectories
from tunix_like.errors import UserError
from tunix_like.models.loading import export_model
from tunix_like.rollout.engines.vllm import VLLMEngine
from tunix_like.text.tokenizer import Tokenizer
from tunix_like.types import Problem, Reply, Turn
from tunix_like.verifiers import environments
from tunix_like.verifiers import process as verifiers_process
from tunix_like.verifiers.environments import VerifiersEnvironments
from tunix_like.verifiers.tasks import HIDDEN_COLUMN, record
from tunix_like.workers import process
from tunix_like.workers.messages import Lost
from tunix_like.workers.routes import CHAT

EXAMPLE = ROOT / "examples" / "environments" / "verifiers_letters.yaml"
ODD = Path(__file__).with_name("verifiers_odd.py")
TOKENIZER = Tokenizer.from_folder(ROOT / "examples" / "environments" / "letters_model")
END = TOKENIZER.eos_ids[0]

has_verifiers = pytest.mark.skipif(
    importlib.util.find_spec("verifiers") is None,
    reason="the package verifiers, with about 90 others, is not installed",
)

Harness = Callable[[dict[str, Any]], Generator[Any, dict[str, Any], dict[str, Any]]]
"""A script: it yields the bodies of requests, or pairs of route and body, receives the answers, and returns
fields of the result."""


class Process:
    """A stand-in for `VerifiersProcess`, whose episodes are scripts."""

    harness: Harness | None = None

    def __init__(self, settings):
        self.messages: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self.scripts: dict[int, Any] = {}
        self.of_call: dict[int, int] = {}
        self.said: list[dict[str, Any]] = []
        self.calls = itertools.count()

    def send(self, message):
        self.said.append(message)
        if message["kind"] == "run":
            script = self.scripts[message["episode"]] = type(self).harness(message["task"])
            self.go(message["episode"], script, None)
        elif message["kind"] == "answer":
            episode = self.of_call.pop(message["call"])
            self.go(episode, self.scripts[episode], message)
        elif message["kind"] == "cancel":
            self.messages.put(
                {"kind": "end", "episode": message["episode"], "reward": None, "metrics": {}, "error": "x"}
            )

    def go(self, episode, script, answer):
        try:
            bodies = script.send(answer)
        except StopIteration as done:
            end = {"kind": "end", "episode": episode, "reward": 1.0, "metrics": {}}
            self.messages.put(end | (done.value or {}))
            return
        if bodies is Lost:
            self.messages.put(None)
            return
        for body in bodies if isinstance(bodies, list) else [bodies] if bodies else []:
            call = next(self.calls)
            self.of_call[call] = episode
            route, body = body if isinstance(body, tuple) else (CHAT, body)
            self.messages.put({"kind": "request", "episode": episode, "call": call, "route": route, "body": body})

    def next(self, seconds):
        try:
            message = self.messages.get(seconds > 0, seconds if seconds > 0 else None)
        except queue.Empty:
            return None
        if message is None:
            raise Lost("its process has ended with status 3")
        return message

    def kill(self):
        pass


def chat(*texts: str, **fields: Any) -> dict[str, Any]:
    """Returns a request whose messages are alternately of the user and of the assistant."""
    roles = itertools.cycle(["user", "assistant"])
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)], **fields}


def said(answer: dict[str, Any]) -> str:
    return str(answer["body"]["choices"][0]["message"]["content"])


@pytest.fixture
def opened(monkeypatch):
    """`opened(harness, rows, size)` starts trajectories of rows with these columns."""

    def begin(harness, rows=({"word": "ab"},), size=2, **settings) -> Trajectories:
        monkeypatch.setattr(Process, "harness", staticmethod(harness))
        monkeypatch.setattr(environments, "VerifiersProcess", Process)
        made = VerifiersEnvironments({"path": "env"}, **{"timeout_seconds": 5.0, **settings})
        player = make_player(made, EnvironmentConfig(max_turns=3), TOKENIZER, RolloutConfig())
        assert player is not None
        problems = [Problem(n, "", TOKENIZER.encode("ab"), {"task": row}, "ab") for n, row in enumerate(rows)]
        return player.start(problems, size, 16)

    return begin


def ids(*texts: str) -> list[int]:
    """Returns the input of the model: the rendered conversation and the start of the answer."""
    return TOKENIZER.encode_guarded(TOKENIZER.render_guarded(chat(*texts)["messages"]), 1000)


def turn(text: str, sample: int = 0, group: int = 0, end: bool = True) -> Turn:
    return Turn(group, sample, [*TOKENIZER.encode(text), *([END] if end else [])], truncated=not end)


def two_tries(task):
    first = yield chat(task["word"])
    second = yield chat(task["word"], said(first), "?")
    return {"reward": 0.5, "metrics": {"letters": float(len(said(second)))}}


def test_continued_conversation_keeps_the_sampled_tokens(opened):
    trajectories = opened(two_tries)
    (problem,) = trajectories.problems
    assert [*problem.tokens, *trajectories.opening(0, 0)] == ids("ab") and problem.text == "<user>ab<end><assistant>"
    trajectories.submit([turn("ba"), turn("c", 1)])
    replies = {reply.sample: reply for reply in trajectories.replies(wait=True)}
    for sample, text in enumerate(["ba", "c"]):
        seen = [*ids("ab"), *turn(text).tokens]
        assert replies[sample] == Reply(0, sample, ids("ab", text, "?")[len(seen) :])
    trajectories.submit([turn("hh"), turn("hhh", 1)])
    assert trajectories.replies(wait=True) == [Reply(0, 0, None), Reply(0, 1, None)]
    episodes = trajectories.episodes()
    assert [(each.reward, each.turns, each.info, each.failure) for each in episodes] == [
        (0.5, 2, {"letters": 2.0}, None),
        (0.5, 2, {"letters": 3.0}, None),
    ]
    assert [message["content"] for message in episodes[0].messages] == ["ba", "?", "hh"]


def test_a_request_with_another_history_is_a_new_segment(opened):
    def rewrites(task):
        yield chat("ab")
        yield chat("ab", "?", "a")

    trajectories = opened(rewrites, size=1)
    trajectories.submit([turn("ba")])
    (reply,) = trajectories.replies(wait=True)
    shared = trajectories.problems[0].tokens
    assert reply.restart and [*shared, *reply.tokens] == ids("ab", "?", "a")
    trajectories.submit([turn("hh")])
    trajectories.replies(wait=True)
    assert trajectories.episodes()[0].rewritten == 1


def test_request_that_does_not_match_the_prompt_is_unscored(opened):
    def other(task):
        yield chat("ab")
        yield chat("cd")

    trajectories = opened(other, size=1)
    trajectories.submit([turn("ba")])
    assert trajectories.replies(wait=True) == [Reply(0, 0, None)]
    (episode,) = trajectories.episodes()
    assert np.isnan(episode.reward) and "does not begin with the prompt" in episode.failure[1]

    count = itertools.count()

    def differs(task):
        yield chat("abc"[: 1 + next(count)])

    trajectories = opened(differs)
    trajectories.submit([turn("a"), turn("a", 1)])
    trajectories.replies(wait=True)
    assert [each.failure and each.failure[0] for each in trajectories.episodes()] == [None, "error"]

    def silent(task):
        return
        yield

    trajectories = opened(silent)
    assert all("ended without a request" in each.failure[1] for each in trajectories.episodes())


def test_first_request_above_the_prompt_limit_fails(opened):
    def harness(task):
        yield chat("a" * 40)

    trajectories = opened(harness, size=1)
    assert "more than rollout.max_prompt_length=16" in trajectories.episodes()[0].failure[1]


def test_requests_after_a_truncated_turn_are_rejected(opened):
    got = []

    def harness(task):
        got.append((yield chat("ab")))
        got.append((yield chat("ab", said(got[0]), "?")))
        return {"reward": 0.25}

    trajectories = opened(harness, size=1)
    trajectories.submit([turn("ba", end=False)])
    (episode,) = trajectories.episodes()
    assert episode.reward == 0.25 and episode.failure is None
    assert got[0]["body"]["choices"][0]["finish_reason"] == "length" and said(got[0]) == "ba"
    assert got[1]["status"] == 400


def test_turn_limit_and_reply_without_space_end_the_row(opened):
    def endless(task):
        texts = ["ab"]
        while (answer := (yield chat(*texts)))["status"] == 200:
            texts += [said(answer), "?"]
        return {"reward": 0.75}

    trajectories = opened(endless)
    for text in ("a", "b", "c"):
        trajectories.submit([turn(text)])
        reply = trajectories.replies(wait=True)
    assert reply == [Reply(0, 0, None)]
    # The engine does not call again for a row whose reply has no space.
    trajectories.submit([turn("a", 1)])
    trajectories.replies(wait=True)
    episodes = trajectories.episodes()
    assert [(each.reward, each.turns, each.limited) for each in episodes] == [(0.75, 3, True), (0.75, 1, False)]


def test_concurrent_requests_of_an_episode_are_answered_in_order(opened):
    def both(task):
        yield [chat("ab"), chat("ab", "c", "?")]
        yield None
        return {"reward": 1.0}

    trajectories = opened(both, size=1)
    trajectories.submit([turn("ba")])
    (reply,) = trajectories.replies(wait=True)
    assert reply.restart
    trajectories.submit([turn("d")])
    assert trajectories.replies(wait=True) == [Reply(0, 0, None)]
    assert trajectories.episodes()[0].reward == 1.0


@contextlib.contextmanager
def served(model, rollout, folder):
    """Yields an engine whose server is a stand-in for vLLM."""
    export_model(model, TOKENIZER, folder / "model")
    server = StandIn(folder / "model", TOKENIZER)
    rollout = dataclasses.replace(rollout, engine="vllm", urls=[server.url])
    engine = VLLMEngine(model, TOKENIZER, rollout, folder / "weights", max_gap=1e-4)
    yield engine
    engine.close()
    server.stop()


@pytest.mark.slow
@pytest.mark.parametrize("where", ["local", "vllm"])
def test_learner_trains_on_the_sampled_tokens(monkeypatch, tmp_path, where):
    """Some rows are continued and some have two segments. The trainer computes the log-probabilities of the sampler."""

    def harness(task):
        first = yield chat("ab")
        if first["status"] == 200 and len(said(first)) % 2:
            first = yield chat("ab", said(first), "?")
        elif first["status"] == 200:
            first = yield chat("ab", "c", "?")
        return {"reward": float(sum(map(ord, said(first))) % 7 + 1) if first["status"] == 200 else 0.0}

    monkeypatch.setattr(Process, "harness", staticmethod(harness))
    monkeypatch.setattr(environments, "VerifiersProcess", Process)
    model = load_model(HF | {"vocab_size": 14}, init="random", seed=0)[0]
    rollout = RolloutConfig(max_prompt_length=8, max_tokens_to_generate=24, eos_tokens=[END, *range(6, 10)])
    data = [record({"data": {"number": n}, "messages": chat("ab")["messages"]}) for n in range(4)]
    with contextlib.ExitStack() as stack:
        engine = None if where == "local" else stack.enter_context(served(model, rollout, tmp_path))
        learner = make(
            reward=(), tokenizer=TOKENIZER, environment=VerifiersEnvironments({"path": "env"}), model=model,
            max_logprob_gap=1e-4, rollout=rollout, engine=engine,
        )  # fmt: skip
        rows = collect(learner, data)
    assert all(row["train/logprob_gap/max"] < 1e-4 and row["train/reward/unscored_frac"] == 0 for row in rows)
    assert max(row["train/turns/rewritten"] for row in rows) > 0 and max(row["train/turns/mean"] for row in rows) > 1


def test_failed_episodes_affect_only_their_trajectory(opened):
    def harness(task):
        if task["word"] == "silent":
            yield None
        yield chat("ab")
        if task["word"] == "hang":
            yield None
        if task["word"] == "lost":
            yield Lost
        return {"error": "scoring failed"} if task["word"] == "fail" else {}

    rows = [{"word": word} for word in ("fine", "hang", "fail", "silent")]
    trajectories = opened(harness, rows, size=1, timeout_seconds=0.3, workers=2)
    trajectories.submit([turn("a", group=group) for group in range(4)])
    assert len(trajectories.replies(wait=True)) == 4
    kinds = [each.failure and each.failure[0] for each in trajectories.episodes()]
    assert kinds == [None, "timeout", "error", "timeout"]

    trajectories = opened(harness, [{"word": "lost"}, {"word": "fine"}], size=1)
    trajectories.submit([turn("a", group=0)])
    assert trajectories.replies(wait=True) == [Reply(0, 0, None)]
    trajectories.submit([turn("a", group=1)])
    trajectories.replies(wait=True)
    lost = trajectories.episodes()
    assert all("its process has ended with status 3" in each.failure[1] for each in lost)
    again = trajectories.player.start(trajectories._given[1:], 1, 16)
    again.submit([turn("a")])
    again.replies(wait=True)
    assert again.episodes()[0].failure is None, "the process is started again"


@pytest.fixture
def program(monkeypatch):
    """Makes `VerifiersProcess` run the program `verifiers_program.py`."""
    start = process.Process.__init__
    name = "tests.environments.verifiers_program"
    monkeypatch.setattr(process.Process, "__init__", lambda self, _, *rest: start(self, name, *rest))
    monkeypatch.setattr(verifiers_process.importlib.util, "find_spec", lambda name: True)


def test_time_without_a_poll_does_not_count(monkeypatch, program, tmp_path):
    made = VerifiersEnvironments({"path": str(tmp_path / "ended")}, timeout_seconds=60.0)
    for number in range(8):
        made.reset(number, {"task": {}})
    found = made.outcomes(wait=False)
    later = types.SimpleNamespace(monotonic=lambda: time.monotonic() + 1000)  # as after a long compilation
    monkeypatch.setattr(environments, "time", later)
    while len(found) < 8:
        found += made.outcomes(wait=True)
    made.close()
    assert [each.failure for each in found] == [None] * 8


def test_output_at_the_end_does_not_block_the_process(program, tmp_path):
    made = verifiers_process.VerifiersProcess({"path": str(tmp_path / "ended")})
    made.kill()
    assert (tmp_path / "ended").exists()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"n": 2}, "n: got 2"),
        ({"stop": ["x"]}, "stop"),
        ({"logprobs": True}, "logprobs"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only parts of type text"),
        ({"chat_template_kwargs": 3}, "chat_template_kwargs"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
def test_unsupported_requests_are_rejected(fields, named):
    with pytest.raises(RequestError, match=named):
        Call.of(0, CHAT, chat("ab") | fields)


def test_fields_of_answers():
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    call = Call.of(3, CHAT, chat("ab", temperature=0.3, max_tokens=4, tools=[tool]))
    text = 'so <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    answer = answer_of(call, text, "stop", (5, 2))
    (choice,) = answer["body"]["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "so"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert answer["body"]["usage"] == {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
    events = answer_of(call._replace(stream=True), text, "stop", (5, 2))["body"].split("\n\n")
    first, last, usage = [json.loads(event.removeprefix("data: ")) for event in events[:3]]
    assert first["choices"][0]["delta"]["tool_calls"][0]["index"] == 0
    assert last["choices"][0]["finish_reason"] == "tool_calls" and usage["usage"]["total_tokens"] == 7
    assert events[3:] == ["data: [DONE]", ""]


def test_the_row_of_a_task():
    data = {"idx": 3, "prompt": "ab", "answer": "ba"}
    row = record({"data": data, "messages": chat("ab")["messages"]})
    assert row["answer"] == "ba" and row["task"] == data and row["prompt"] == [{"role": "user", "content": "ab"}]
    assert row[HIDDEN_COLUMN] == record({"data": data | {"idx": 4}, "messages": []})[HIDDEN_COLUMN]


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["environment.history=template"], "environment.history: data.name=verifiers does not read it"),
        (["environment.name=guess"], "environment.name"),
        (["data.name=mix", "data.path=null", "data.arguments=null", "data.eval_arguments=null", "data.eval_size=null",
          "data.sources=[{name: verifiers}]"], "cannot be part of a mix"),
    ],
)  # fmt: skip
def test_keys_without_an_effect_are_rejected(overrides, named):
    with pytest.raises(UserError, match=named):
        kind_of(load(EXAMPLE, overrides))


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["data.path=null"], "data.path: data.name=verifiers needs the id"),
        (["data.path=nowhere.py"], "there is no such file"),
        (["data.maze_size=9"], "data.maze_size is not read by data.name=verifiers"),
        ([], "pip install 'tunix-like\\[envs\\]'"),
    ],
)
def test_data_that_cannot_be_read_is_rejected(monkeypatch, overrides, named):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(verifiers_process.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=named):
        load_source(load(EXAMPLE, overrides).data)


def test_tokenizer_without_a_chat_template_is_rejected():
    plain = Tokenizer(TOKENIZER._backend, eos_token="<end>")
    with pytest.raises(UserError, match="no chat template"):
        make_player(VerifiersEnvironments({}), EnvironmentConfig(), plain, RolloutConfig())


@has_verifiers
@pytest.mark.slow
def test_the_tasks_of_the_example(monkeypatch):
    monkeypatch.chdir(ROOT)
    source = load_source(load(EXAMPLE).data)
    assert len(source.train) == 3686 and len(source.eval) == 64
    row = source.train[0]
    assert row["answer"] == row["prompt"][0]["content"][::-1] == row["task"]["answer"]
    source = load_source(load(EXAMPLE, ["data.eval_arguments=null", "data.eval_size=null"]).data)
    assert len(source.train) == 3622 and len(source.eval) == 64


@has_verifiers
@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["data.path=no-such-environment"], "no-such-environment' not found"),
        (["data.arguments={taskset: {lenght: 3}}"], "data.arguments.taskset.lenght: Extra inputs"),
        (["data.eval_arguments={splt: test}"], "data.eval_arguments.splt: Extra inputs"),
        (["data.eval_size=1000"], "data.eval_size=1000, but there are only 410 rows"),
        (["data.arguments={agent: {harness: {id: bash}}}"], "its harness bash runs commands of the model"),
        ([f"data.path={ODD}", "data.arguments={taskset: {rows: 0}}", "data.eval_arguments=null"], "has no tasks"),
    ],
)  # fmt: skip
def test_unusable_environments_are_rejected(monkeypatch, overrides, named):
    monkeypatch.chdir(ROOT)
    with pytest.raises(UserError, match=named):
        load_source(load(EXAMPLE, overrides).data)


@has_verifiers
@pytest.mark.slow
def test_harness_that_cannot_start_is_rejected():
    made = VerifiersEnvironments({"path": str(ODD), "arguments": {}, "list": None})
    player = make_player(made, EnvironmentConfig(), TOKENIZER, RolloutConfig())
    assert player is not None
    with pytest.raises(UserError, match="its first task cannot be played.*no such program"):
        player.check([{"task": {"prompt": "ab", "answer": "program"}}], 100)
    made.close()


@has_verifiers
@pytest.mark.slow
def test_episodes_of_the_real_package_that_hang_crash_or_fail():
    made = VerifiersEnvironments({"path": str(ODD), "arguments": {}, "list": None}, timeout_seconds=3.0)

    def play(*kinds: str) -> list[Any]:
        found: dict[int, Any] = {}
        for number, kind in enumerate(kinds):
            made.reset(number, {"task": {"prompt": "ab", "answer": kind}})
        while len(found) < len(kinds):
            for outcome in made.outcomes(wait=True):
                if outcome.failure is not None or outcome.done:
                    found[outcome.number] = outcome.failure and outcome.failure.kind
                else:
                    made.step(outcome.number, "ba")
        return [found[number] for number in range(len(kinds))]

    assert play("fine", "hang", "raise", "nan") == [None, "timeout", "error", "error"]
    assert play("exit") == ["error"]
    assert play("block") == ["timeout"]
    assert play("fine", "fine") == [None, None], "a new process has taken over"
    pid = made._process.pid
    made.close()
    assert has_ended(pid)


@has_verifiers
@pytest.mark.slow
def test_training_run_of_the_example(monkeypatch, tmp_path):
    """Trains, evaluates and resumes with the real package."""
    monkeypatch.chdir(ROOT)
    small = ["sft.max_steps=30", "data.batch_size=8", "data.eval_size=8", "eval.samples=2", "eval.k=[1]"]
    steps = [f"training.output_dir={tmp_path / 'run'}", "training.loggers=[]", *small]
    for last in (2, 3):
        row = run(EXAMPLE, [*steps, f"training.max_steps={last}"])
        assert row["step"] == last and row["train/logprob_gap/max"] < 1e-4
        assert row["train/reward/unscored_frac"] == 0 and row["train/turns/mean"] >= 1 and "eval/pass@1" in row
    episodes = [json.loads(line) for line in (tmp_path / "run/rollouts/step_000001.jsonl").open()]
    assert len(episodes) == 64 and all(each["prompt"].endswith("<end><assistant>") for each in episodes)


def test_the_environments_of_a_config():
    made = environments_of(load(EXAMPLE, ["environment.workers=5", "environment.timeout_seconds=7"]))
    assert isinstance(made, VerifiersEnvironments) and (made.workers, made.timeout_seconds) == (5, 7.0)


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
