"""Tests the environment `openenv`: actions and observations by schema, servers with wrong answers, and real servers."""

from __future__ import annotations

import contextlib
import http
import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process import ROOT
from tunix_like import EnvironmentPool
from tunix_like.environments import deadline
from tunix_like.errors import EnvironmentMisconfigured, EnvironmentUnavailable, UserError
from tunix_like.openenv.environment import ActionForm, OpenEnv, action_form, action_of, text_of, tool_result
from tunix_like.openenv.session import InvalidAction, Session, _is_here, checked_url

CUT = "the connection is cut"
SERVER = Path(__file__).with_name("openenv_server.py")
MESSAGE = {"properties": {"message": {"type": "string"}, "metadata": {"type": "object"}}, "required": ["message"]}
MOVE = {"properties": {"steps": {"type": "integer"}, "direction": {"type": "string"}}, "required": ["steps"]}
CALL = {"properties": {"type": {}, "tool_name": {}, "arguments": {}}, "required": ["tool_name"]}

has_websockets = pytest.mark.skipif(
    importlib.util.find_spec("websockets") is None, reason="the package websockets is not installed"
)
has_openenv = pytest.mark.skipif(
    importlib.util.find_spec("openenv") is None, reason="the package openenv, with about 100 others, is not installed"
)


@pytest.mark.parametrize(
    ("schema", "field", "expected"),
    [
        (MESSAGE, None, ActionForm("text", "message")),
        (MOVE, None, ActionForm("value", "steps")),
        (MOVE | {"required": ["steps", "direction"]}, None, ActionForm("object", fields=("steps", "direction"))),
        (MOVE | {"required": []}, None, ActionForm("object", fields=("steps", "direction"))),
        (MOVE | {"required": []}, "direction", ActionForm("text", "direction")),
        (CALL, None, ActionForm("tools")),
        (CALL, "tool_name", ActionForm("text", "tool_name")),
        ({}, None, ActionForm("object")),
        ({}, "free", ActionForm("text", "free")),
        ({"properties": {"a": {"anyOf": [{"type": "null"}, {"type": "string"}]}}}, None, ActionForm("text", "a")),
        ({"properties": {"a": {"type": ["integer", "null"]}}}, None, ActionForm("value", "a")),
        ({"properties": {"a": {"$ref": "#/$defs/Kind"}}}, None, ActionForm("value", "a")),
    ],
)
def test_schema_of_actions(schema, field, expected):
    assert action_form(schema, field) == expected


def test_unknown_field_of_actions_is_rejected():
    with pytest.raises(UserError, match="no field 'text'; they have: message"):
        action_form(MESSAGE, "text")
    with pytest.raises(UserError, match="need steps besides 'direction'"):
        action_form(MOVE, "direction")


def test_conversion_of_turns_to_actions():
    text, value, both = ActionForm("text", "m"), ActionForm("value", "n"), ActionForm("object", fields=("a", "b"))
    assert action_of(text, "<think>7 {</think> go\nleft ") == {"m": "go\nleft"}
    assert action_of(text, "opened by the template</think>left") == {"m": "left"}
    assert action_of(text, "<think>never closed") == {"m": ""}
    assert action_of(value, " 3 ") == {"n": 3} and action_of(value, "```json\n[1]\n```") == {"n": [1]}
    assert action_of(both, '{"a": 1, "c": null}') == {"a": 1, "c": None}, "the server checks the fields"
    with pytest.raises(InvalidAction, match="write the value of n as JSON"):
        action_of(value, "three")
    with pytest.raises(InvalidAction, match="not a JSON object; write an action as a JSON object with a, b"):
        action_of(both, "3")
    with pytest.raises(InvalidAction, match="not valid JSON"):
        action_of(both, "[" * 100_000)


def test_conversion_of_observations_to_text():
    assert text_of({}) is None and text_of({"a": "", "b": None, "c": [], "metadata": {"x": 1}}) is None
    assert text_of({"a": "seen", "b": ""}) == "seen" and text_of({"a": 0}) == "0" and text_of({"a": False}) == "false"
    assert text_of({"a": "é", "n": 2}) == '{"a": "é", "n": 2}' and text_of({"a": ["x"]}) == '["x"]'
    message = {"role": "user", "content": "hi", "tokens": [1]}
    assert text_of({"messages": [message]}) == [{"role": "user", "content": "hi"}]
    assert text_of({"messages": [{"role": "user"}]}) == '[{"role": "user"}]'


def test_conversion_of_tool_results_to_text():
    assert tool_result({"tool_name": "f", "result": "text"}) == "text" and tool_result({"result": None}) == ""
    assert tool_result({"result": {"a": 1}}) == '{"a": 1}' and tool_result({"result": 7}) == "7"
    parts = [{"type": "text", "text": "one"}, {"type": "image"}, {"type": "text", "text": "two"}]
    assert tool_result({"result": {"content": parts, "data": 3}}) == "one\ntwo"
    assert tool_result({"result": {"content": parts[:1], "is_error": True}}) == "error: one"
    assert tool_result({"error": {"error_type": "x", "message": "no"}, "result": None}) == "error: no"
    assert tool_result({"error": "no"}) == "error: no" and tool_result({"text": "other"}) == "other"


def test_addresses_are_checked():
    assert checked_url("http://127.0.0.1:8000/") == "http://127.0.0.1:8000"
    assert checked_url("https://me-env.hf.space/base") == "https://me-env.hf.space/base"
    for wrong in ("127.0.0.1:8000", "ws://h", "http://", "http://h:x", "http://h?a=1", "", 3, None):
        with pytest.raises(UserError, match="write the address of the server"):
            checked_url(wrong)
    assert all(map(_is_here, ("http://localhost:1", "http://127.0.0.2", "http://[::1]:1")))
    assert not _is_here("http://127.0.0.1.example.com") and not _is_here("http://10.0.0.1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "'OpenEnv' needs a value for url; set environment.arguments.url"),
        ({"url": "http://h", "foo": 1}, "'OpenEnv' has no parameter 'foo'; it has: url, action, observation"),
        ({"url": "h"}, "write the address of the server, e.g. http://127.0.0.1:8000"),
        ({"url": "http://h", "action": 3}, "action is 3; write the name of a field"),
        ({"url": "http://127.0.0.1:9"}, r"127.0.0.1:9: it cannot be reached \(Connection refused\); start it, or"),
    ],
)
@has_websockets
def test_invalid_arguments_are_rejected(arguments, message):
    pool = EnvironmentPool("openenv", arguments=arguments, workers=1)
    with pytest.raises(UserError, match=message):
        _ = pool.tools


@contextlib.contextmanager
def odd_server(answers, schema=None) -> Iterator[str]:
    """Yields the address of a local server that sends these texts, one for each message, and then closes the
    session."""
    from websockets.datastructures import Headers
    from websockets.http11 import Response
    from websockets.sync.server import serve

    def respond(connection, request):
        if request.path != "/ws":
            content = json.dumps({"action": MESSAGE}) if schema is None else schema
            length = Headers([("Content-Length", str(len(content)))])
            return Response(http.HTTPStatus.OK, "OK", length, content.encode())
        return None

    def handle(connection):
        for answer in answers:
            connection.recv()
            if answer == CUT:
                connection.socket.shutdown(socket.SHUT_RDWR)
                return
            connection.send(answer)

    with serve(handle, "127.0.0.1", 0, process_request=respond) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        finally:
            server.shutdown()
            thread.join()


def seen(**content) -> str:
    return json.dumps({"type": "observation", "data": {"observation": {"text": "hi"}} | content})


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("not JSON", "answered step with 'not JSON'"),
        ("[1]", "answered step with"),
        ('{"type": "observation", "data": {}}', "its answer to step has no observation"),
        (seen(observation="text"), "its answer to step has no observation"),
        (seen(reward="much"), "step: reward 'much' is not a number"),
        (seen(reward=1e400), "step: reward inf is not a finite number"),
        (seen(done="yes"), "step: done is 'yes', of type str"),
        ('{"type": "error", "data": {"message": "full", "code": "CAPACITY_REACHED"}}', "set max_concurrent_envs"),
        ('{"type": "error", "data": {"message": "broken", "code": "EXECUTION_ERROR"}}', "step failed: broken"),
        (None, "it closed the session in step"),
    ],
)
@has_websockets
def test_invalid_answer_of_a_server_raises(answer, message):
    with odd_server([seen(), *([] if answer is None else [answer])]) as url:
        environment = OpenEnv(url)
        assert environment.tool_schemas() == [] and environment.reset() == "\nhi"
        with pytest.raises(UserError, match=message):
            environment.step("x")
        environment.close()


@has_websockets
def test_lost_session_is_not_reopened():
    with odd_server([seen(), seen()]) as url:
        session = Session(url)
        assert session.call("reset", {})["observation"] == session.call("step", {})["observation"] == {"text": "hi"}
        for _ in range(2):
            with pytest.raises(UserError, match="it closed the session in step"):
                session.call("step", {})


@has_websockets
def test_connection_is_retried_within_the_time_limit(monkeypatch):
    with odd_server([seen()]) as url:
        connect, failed = Session._connect, []

        def fail_twice(session, seconds):
            if len(failed) < 2:
                failed.append(seconds)
                raise EnvironmentUnavailable("away")
            connect(session, seconds)

        monkeypatch.setattr(Session, "_connect", fail_twice)
        with pytest.raises(EnvironmentUnavailable):
            Session(url)  # without a time limit there is one attempt
        failed.clear()
        monkeypatch.setattr(deadline, "_end", time.monotonic() + 10)
        assert Session(url).call("reset", {}) and failed == pytest.approx([7.5, 7.4], abs=0.2)


@has_websockets
def test_only_a_lost_connection_is_an_unavailable_server():
    def kind(url):
        environment = OpenEnv(url)
        environment.reset()
        with pytest.raises(UserError) as caught:
            environment.step("x")
        return type(caught.value)

    with odd_server([seen()]) as url:
        assert kind(url) is UserError, "the server has ended the session by a message"
    with odd_server([seen(), CUT]) as url:
        assert kind(url) is EnvironmentUnavailable


@has_websockets
def test_server_without_a_free_session_raises(monkeypatch):
    full = '{"type": "error", "data": {"message": "full.", "code": "CAPACITY_REACHED"}}'
    with odd_server([full]) as url, pytest.raises(EnvironmentMisconfigured, match=r"full\. Each .*max_concurrent_envs"):
        OpenEnv(url).reset()
    monkeypatch.setattr(deadline, "_end", time.monotonic() + 10)
    with odd_server(iter([full, "not sent, because the session is closed", seen()])) as url:
        assert OpenEnv(url).reset() == "\nhi", "a session that is ending becomes free"


@pytest.mark.parametrize(
    ("schema", "message"),
    [("<html>", "did not answer with JSON"), ("{}", "has no schema of actions"), ("[]", "has no schema of actions")],
)
@has_websockets
def test_server_that_is_not_an_openenv_server_is_rejected(schema, message):
    with odd_server([], schema) as url, pytest.raises(UserError, match=message):
        OpenEnv(url).tool_schemas()


@has_websockets
def test_metrics_and_selected_field_of_the_observation():
    answer = seen(observation={"text": "hi", "n": 2, "metadata": {"score": 3, "note": "x"}}, reward=True)
    with odd_server([answer, answer]) as url:
        environment = OpenEnv(url, observation="n")
        assert environment.reset() == "\n2"
        result = environment.step("x")
        assert result.observation == "2" and result.reward == 1.0 and not result.done
        assert result.info == {"score": 3.0, "action_errors": 0.0}
        environment.close()
    with (
        odd_server([answer]) as url,
        pytest.raises(EnvironmentMisconfigured, match="no field 'words'; it has: text, n, meta"),
    ):
        OpenEnv(url, observation="words").reset()


@contextlib.contextmanager
def serving(kind: str, sessions: int = 16) -> Iterator[str]:
    """Yields the address of a real OpenEnv server in a separate process."""
    command = [sys.executable, str(SERVER), kind, str(sessions)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = f"http://127.0.0.1:{process.stdout.readline().strip()}"
            deadline = time.monotonic() + 60
            while True:
                try:
                    urllib.request.urlopen(f"{url}/health", timeout=5)
                    break
                except OSError:
                    assert process.poll() is None and time.monotonic() < deadline
                    time.sleep(0.05)
            yield url
        finally:
            process.kill()


def wait(pool, count=1):
    """Returns the outcomes of `count` calls, by trajectory."""
    found = {}
    while len(found) < count:
        found |= {outcome.number: outcome for outcome in pool.outcomes(wait=True)}
    return found


@contextlib.contextmanager
def pool_of(url, **given) -> Iterator[EnvironmentPool]:
    limits = {"workers": 8, "timeout_seconds": 20} | {k: given.pop(k) for k in ("timeout_seconds",) if k in given}
    pool = EnvironmentPool("openenv", arguments={"url": url} | given, **limits)
    try:
        yield pool
    finally:
        pool.close()


@has_openenv
def test_trajectories_have_sessions_of_their_own():
    with serving("guess") as url, pool_of(url, observation="text") as pool:
        assert not pool.tools
        for number in range(4):
            pool.reset(number, {"number": number, "rule": "Guess.", "answer": "not taken by the server"})
        assert [outcome.observation for outcome in wait(pool, 4).values()] == ["\nGuess."] * 4
        for number in range(4):
            pool.step(number, "<think>1</think>2")
        found = wait(pool, 4)
        assert [found[n].observation for n in range(4)] == ["LOWER", "LOWER", None, "HIGHER"]
        assert [found[n].done for n in range(4)] == [False, False, True, False] and found[2].reward == 1.0
        assert found[2].info == {"solved": 1.0, "action_errors": 0.0}
        for number in range(4):
            pool.finish(number)
        assert all(outcome.failure is None for outcome in wait(pool, 4).values())


@has_openenv
def test_failure_affects_only_its_trajectory():
    with serving("guess", 3) as url, pool_of(url, observation="text", timeout_seconds=5) as pool:
        for number in range(4):
            pool.reset(number, {"number": 3})
        found = wait(pool, 4)
        (refused,) = [outcome for outcome in found.values() if outcome.failure is not None]
        assert (
            refused.failure.kind == "misconfigured"
            and "set max_concurrent_envs of the server" in refused.failure.reason
        )
        one, two, three = [n for n in range(4) if n != refused.number]
        for number, text in ((one, "raise"), (two, "hang"), (three, "3")):
            pool.step(number, text)
        found = wait(pool, 3)
        assert found[one].failure.kind == "error" and "step failed: the game is broken" in found[one].failure.reason
        assert found[two].failure.kind == "timeout" and found[three].done and found[three].failure is None
        pool.finish(three)
        wait(pool)
        for number in (one, three):  # the sessions that have ended are available again
            pool.reset(number, {"number": 3})
        assert all(outcome.failure is None for outcome in wait(pool, 2).values())
        pool.step(one, "die")  # the server exits
        lost = [wait(pool)[one].failure]
        pool.step(three, "3")
        lost.append(wait(pool)[three].failure)
        assert all("it closed the session in step" in failure.reason for failure in lost)
        start = time.monotonic()
        pool.reset(7, {})
        lost.append(wait(pool)[7].failure)
        assert "(environment.arguments.url): no session could be opened (Connection refused)" in lost[2].reason
        assert [failure.kind for failure in lost] == ["unavailable"] * 3
        assert 1.5 < time.monotonic() - start < 30, "it is tried again within the time limit"


@has_openenv
def test_episode_that_ends_at_its_reset_is_rejected():
    with serving("guess") as url, pool_of(url) as pool:
        pool.reset(0, {"rule": "over"})
        assert "the episode is over after the reset" in wait(pool)[0].failure.reason


@has_openenv
def test_actions_that_the_server_rejects_are_answered_with_an_error():
    with serving("walk") as url, pool_of(url) as pool:
        pool.reset(0, {})
        wait(pool)
        replies = []
        for text in ('```json\n{"steps": 3, "direction": "up"}\n```', '{"steps": "x"}', "left"):
            pool.step(0, text)
            replies.append(wait(pool)[0])
        assert replies[0].observation == '{"text": "3 up", "turns": 7}' and replies[0].reward == 0.5
        assert replies[1].observation.startswith("error: steps: Input should be a valid integer")
        assert replies[1].observation.endswith("; direction: Field required")
        assert replies[2].observation.startswith("error: the turn is not valid JSON; write an action as a JSON object")
        assert [reply.info["action_errors"] for reply in replies] == [0, 1, 2] and not replies[2].done
    with serving("exact") as url, pool_of(url, observation="text") as pool:
        pool.reset(0, {})
        wait(pool)
        pool.step(0, "3")
        assert wait(pool)[0].done


@has_openenv
def test_tools_of_a_server():
    def call(name, **given):
        return f"<tool_call>{json.dumps({'name': name, 'arguments': given})}</tool_call>"

    with serving("sums") as url, pool_of(url) as pool:
        (tool,) = pool.tools
        assert tool["function"]["name"] == "add" and set(tool["function"]["parameters"]["properties"]) == {"a", "b"}
        pool.reset(0, {"question": "5 + 7"})
        assert wait(pool)[0].observation is None
        pool.step(0, call("add", a=5, b=7) + call("sub") + call("add", a=-1, b=2) + "<tool_call>{</tool_call>")
        reply = wait(pool)[0]
        assert reply.observation[0] == {"role": "tool", "content": "12", "name": "add"} and reply.reward == 1.0
        assert all(message["content"].startswith("error: ") for message in reply.observation[1:])
        assert reply.info == {"tool_calls": 4.0, "tool_errors": 3.0} and not reply.done
        pool.step(0, "It is 12.")
        assert wait(pool)[0].done


@pytest.mark.slow
@has_openenv
def test_training_run_with_an_openenv_server(tmp_path, monkeypatch, capsys):
    """A tiny model is checked, trained and evaluated with a real server. Without a server the run does not start."""
    from tunix_like.cli import main as cli

    monkeypatch.chdir(tmp_path)
    example = str(ROOT / "examples" / "environments" / "guess.yaml")
    small = ["training.max_steps=1", "sft.max_steps=1", "data.batch_size=8", "eval.max_problems=8", "eval.samples=1"]
    small += ["algorithm.num_generations=2", "data.train_size=32", "training.output_dir=run", "eval.k=[1]"]
    small += ["environment.name=openenv", "environment.arguments.observation=text"]
    with serving("guess", 64) as url:
        at = f"environment.arguments.url={url}"
        assert cli.main(["check-rewards", example, *small, at]) == 0, capsys.readouterr().out
        assert cli.main(["train", example, *small, at]) == 0
        assert "environment/solved" in capsys.readouterr().out
        wrong = [example, *small, at, "environment.arguments.observation=words"]
        assert cli.main(["check-rewards", *wrong]) == cli.main(["train", *wrong, "training.output_dir=wrong"]) == 2
        assert capsys.readouterr().err.count("error: environment.arguments: the observation of") == 2
    with serving("guess", 1) as small_server:
        own = [f"environment.arguments.url={small_server}", "training.output_dir=full"]
        assert cli.main(["train", example, *small, *own]) == 2
        assert "active. Cannot accept new connections. Each trajectory needs" in capsys.readouterr().err
    # In a separate process, because the type checks of the tests examine `tools` too.
    command = [sys.executable, "-m", "tunix_like", "train", example, *small, at, "training.output_dir=other"]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2 and done.stderr.strip().splitlines()[-1].startswith(
        f"error: OpenEnv server {url}: it cannot be reached (Connection refused); start it, or correct url"
    )
