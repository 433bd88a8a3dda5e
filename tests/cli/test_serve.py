"""Tests `tunix-like serve` as a process: the same answers as `generate`, signals, and one-line errors."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest

import tunix_like
from tests.tiny_model import HF as SMALL
from tunix_like.cli import main as cli
from tunix_like.cli import serve
from tunix_like.data import reverse_text

pytestmark = pytest.mark.slow

PROMPTS = ["abc>", "a>", "hgfedcba>", "jjjjjjjjjjjj>"]
SIZES = ["rollout.max_prompt_length=64", "rollout.max_tokens_to_generate=64"]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("serve")
    model, _ = tunix_like.load_model(SMALL | {"max_position_embeddings": 8192}, init="random")
    tunix_like.export_model(model, reverse_text.tokenizer(), folder / "letters")
    return folder


@contextlib.contextmanager
def serving(home, *options, key=None, files=None, source="letters"):
    """Yields the process and its address, and kills it at the end."""
    environment = {name: value for name, value in os.environ.items() if name != serve.KEY}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path)} | ({serve.KEY: key} if key else {})
    command = [sys.executable, "-m", "tunix_like", "serve", source, "--port", "0", "--max-rows", "4", *options]
    if files is not None:
        command = ["sh", "-c", f'ulimit -n {files} && exec "$@"', "sh", *command]
    process = subprocess.Popen(command, cwd=home, env=environment, stderr=subprocess.PIPE, text=True)
    lines = []
    try:
        for line in process.stderr:
            lines.append(line)
            if found := re.match(r"serving \S+ at (http://\S+)/v1$", line):
                reader = threading.Thread(target=lambda: lines.extend(process.stderr))
                reader.start()
                yield process, found[1], lines
                return
        raise AssertionError("".join(lines))
    finally:
        process.kill()
        process.wait()


def test_answers_are_those_of_generate(home, monkeypatch, capsys):
    monkeypatch.chdir(home)
    wanted = []
    for prompt in PROMPTS:
        assert cli.main(["generate", "letters", "--prompt", prompt, "--greedy", *SIZES]) == 0
        wanted.append(capsys.readouterr().out.removesuffix("\n"))
    with serving(home, *SIZES) as (_, url, _):
        body = {"model": "letters", "prompt": PROMPTS, "temperature": 0, "max_tokens": 64}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
        assert [choice["text"] for choice in answer["choices"]] == wanted


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_running_requests_finish(home, sent):
    with serving(home, "--max-length", "8000", "rollout.eos_tokens=[12]") as (process, url, lines):
        body = {"prompt": "a>", "max_tokens": 1500, "stream": True, "temperature": 0}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
            events = answer.iter_lines()
            next(events)
            process.send_signal(sent)
            with pytest.raises(httpx.ConnectError):
                while True:
                    # A connection whose request the server has not read yet is closed or reset when it stops listening.
                    with contextlib.suppress(httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError):
                        httpx.get(f"{url}/health")
                    time.sleep(0.05)
            assert list(events)[-2] == "data: [DONE]"
        assert process.wait(timeout=60) == 0
        assert not any("Traceback" in line or "ERROR" in line for line in lines), lines


def test_running_requests_are_aborted_at_the_deadline_after_a_signal(home, monkeypatch, tmp_path):
    """With a deadline of one second, a request of hours is aborted."""
    (tmp_path / "sitecustomize.py").write_text(
        "import tunix_like.cli.serve\ntunix_like.cli.serve.SECONDS_TO_FINISH = 1\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with serving(home, "--max-length", "8000", "rollout.eos_tokens=[12]") as (process, url, _):
        bodies = {"prompt": "a>", "max_tokens": 7000, "stream": True, "n": 100}
        with httpx.stream("POST", f"{url}/v1/completions", json=bodies, timeout=60) as answer:
            events = answer.iter_lines()
            next(events)
            process.send_signal(signal.SIGTERM)
            began = time.monotonic()
            with contextlib.suppress(httpx.RemoteProtocolError):
                list(events)
        assert process.wait(timeout=60) == 0 and time.monotonic() - began < 30


def test_api_key_from_an_environment_variable(home):
    with serving(home, "--host", "0.0.0.0", key="secret") as (_, url, _):
        url = url.replace("0.0.0.0", "127.0.0.1")
        assert httpx.get(f"{url}/v1/models").status_code == 401
        assert httpx.get(f"{url}/v1/models", headers={"authorization": "Bearer secret"}).status_code == 200


def test_idle_connections_do_not_use_up_the_open_files(home):
    with serving(home, key="secret", files=200) as (process, url, lines), contextlib.ExitStack() as stack:
        port = int(url.rpartition(":")[2])
        for _ in range(400):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
        assert httpx.get(f"{url}/health", timeout=10).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    assert len(lines) < 10, lines[:10]


@pytest.fixture
def refused(home, monkeypatch, capsys):
    monkeypatch.chdir(home)
    monkeypatch.delenv(serve.KEY, raising=False)

    def call(*argv):
        code = cli.main(["serve", *argv])
        error = capsys.readouterr().err
        assert code == 2 and error.count("\n") == 1, error
        return error

    return call


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "example.com", "192.0.2.1"])
def test_other_hosts_need_a_key(refused, host):
    assert f"--host {host} is reachable from other machines" in refused("letters", "--host", host)


def test_a_port_in_use(refused):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"cannot listen on 127.0.0.1, port {port}" in refused("letters", "--port", str(port))


def test_a_port_that_two_processes_bind_at_the_same_moment(refused, monkeypatch):
    """Both can bind the port, and the second one fails when it listens."""
    bind = serve._listen
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]

        def bound(*given):
            listener = bind(*given)
            other.listen()
            return listener

        monkeypatch.setattr(serve, "_listen", bound)
        assert f"cannot listen on 127.0.0.1, port {port}: Address already in use" in refused(
            "letters", "--port", str(port), "--max-rows", "1", *SIZES
        )


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["--port", "70000"], "--port 70000"),
        (["--port", "-1"], "--port -1"),
        (["--max-rows", "0"], "--max-rows 0: it must be at least 1"),
        (["--max-length", "1"], "--max-length 1"),
        (["--max-waiting", "0"], "--max-waiting 0"),
        (["--port", "0", "--max-length", "9000"], "the model has 8192 positions"),
        (["--port", "0", "--host", "127.0.0.999"], "reachable"),
    ],
)
def test_bad_options(refused, argv, part):
    assert part in refused("letters", *argv)


def test_error_names_the_missing_extra(refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert re.search(r"uvicorn.*: pip install 'tunix-like\[serve\]'", refused("letters"))


def test_missing_model_is_an_error(refused):
    assert "nothing" in refused("nothing", "--port", "0")
