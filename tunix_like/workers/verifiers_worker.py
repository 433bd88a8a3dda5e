"""Runs an environment of the package `verifiers` (its tasks, its harness and its rewards) in a separate process.

The harness (the program that plays a task) sends its model requests to the interception server of `verifiers`, which
forwards them to an HTTP endpoint of this process. This process forwards the requests to the training process, which
samples the answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import hmac
import itertools
import json
import math
import os
import secrets
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunix_like.workers.child import send
from tunix_like.workers.messages import HEADER, message
from tunix_like.workers.routes import COUNT, LOCAL, MODEL, ROUTES

KEY_VARIABLE = "TUNIX_LIKE_EPISODES_API_KEY"
"""Environment variable with the API key of the HTTP endpoint. `verifiers` does not pass this variable to the programs
that it starts."""


class Unusable(Exception):
    """The environment cannot be used. The message of this exception gives the reason."""


def main(channel: socket.socket, settings: Mapping[str, Any]) -> None:
    """Lists tasks or plays episodes. An exception is sent as the reason why the environment is unusable."""
    sys.path.insert(0, os.getcwd())  # an environment may be a module in the folder where the run was started
    try:
        config, env = load(settings)
        if settings["list"] is not None:
            return send(channel, {"kind": "tasks", **_listed(settings, env)})
        asyncio.run(Episodes(env, config).run(channel.dup()))
    except Exception as error:
        channel.setblocking(True)
        send(channel, {"kind": "unusable", "reason": _reason(error)})


def _reason(error: BaseException) -> str:
    """Describes an error of an environment in one line."""
    import pydantic

    if isinstance(error, pydantic.ValidationError):
        return _wrong("data.arguments", error)
    text = " ".join(str(error).split())
    if isinstance(error, Unusable):
        return text
    cause = "" if error.__cause__ is None else f" ({error.__cause__})"
    return f"{type(error).__name__}: {text.rstrip('.')}{cause}"


def _wrong(where: str, error: Any) -> str:
    """Describes a pydantic validation error in one line; `where` is the config key, such as `data.eval_arguments`."""
    found = error.errors()[0]
    return f"{'.'.join([where, *map(str, found['loc'])])}: {found['msg']}"


def load(settings: Mapping[str, Any]) -> tuple[Any, Any]:
    """Loads an environment. Returns the configuration of its agent, and the environment.

    Args:
      settings: `path` is the id of a taskset or a Python file; `arguments` is the configuration in the form of
        `verifiers`.

    Raises:
      Unusable: the environment has several agents, or its harness runs commands and no runtime is set.
      Exception: whatever `verifiers` and the module of the environment raise.
    """
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.runtimes import PrimeConfig
    from verifiers.v1.utils.loaders import harness_class, load_environment, resolve_env_config

    given = _with_taskset(settings["path"], settings["arguments"])
    config = resolve_env_config(copy.deepcopy(given))
    agents = agent_config_fields(config)
    if len(agents) != 1:
        raise Unusable(f"it has the agents {', '.join(agents)}; only environments with one agent can be trained on")
    ((name, agent),) = agents.items()
    changed = dict(given.get(name) or {})
    if isinstance(agent.runtime, PrimeConfig) and "runtime" not in changed:
        harness = config.agent_harnesses()[name].id
        if harness_class(harness).EXECUTES_CODE:
            raise Unusable(
                f"its harness {harness} runs commands of the model, and no runtime is set; set "
                f"data.arguments.{name}.runtime.type to docker, or to subprocess if they may run on this machine, or "
                f"choose another harness (data.arguments.{name}.harness.id)"
            )
        changed["runtime"] = {"type": "subprocess"}
    config = resolve_env_config({**copy.deepcopy(given), name: changed})
    return agent_config_fields(config)[name], load_environment(config)


def _with_taskset(path: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of the environment's configuration `arguments` with the id of the taskset.

    The id is `path`. If `path` is a Python file, the id is the name of the file without `.py`, and the folder of the
    file is added to `sys.path`."""
    name = path
    if path.endswith(".py"):
        file = Path(path).absolute()
        name = file.stem
        if not name.isidentifier() or name != name.lower():
            raise Unusable(f"the name of the file {file.name} must be a lower-case Python name")
        sys.path.insert(0, str(file.parent))
    given = copy.deepcopy(dict(arguments))
    given["taskset"] = {**(given.get("taskset") or {}), "id": name}
    return given


def _listed(settings: Mapping[str, Any], env: Any) -> dict[str, Any]:
    """Returns the environment's training tasks as dicts, and its evaluation tasks if `data.eval_arguments` is set."""
    import pydantic
    from verifiers.v1.utils.loaders import load_taskset, taskset_config_type

    wanted = settings["list"]
    found = {"train": _tasks(env.taskset, wanted["train"])}
    if wanted["eval_arguments"] is not None:
        given = _with_taskset(settings["path"], settings["arguments"])["taskset"] | wanted["eval_arguments"]
        try:
            config = taskset_config_type(given["id"]).model_validate(given)
        except pydantic.ValidationError as error:
            raise Unusable(_wrong("data.eval_arguments", error)) from None
        found["eval"] = _tasks(load_taskset(config), wanted["eval"])
    return found


def _tasks(taskset: Any, most: int | None) -> list[dict[str, Any]]:
    if most is None and not taskset.bounded:
        raise Unusable("the number of its tasks is not limited; set data.train_size and data.eval_size")
    return [
        {"data": task.data.model_dump(mode="json"), "messages": _messages(task.data)}
        for task in itertools.islice(taskset, most)
    ]


def _messages(data: Any) -> list[dict[str, str]]:
    """Returns the prompt of a task as text messages. During an episode, the harness can send different
    messages to the model."""
    from verifiers.v1.types import content_text

    found = [] if data.system_prompt is None else [{"role": "system", "content": data.system_prompt}]
    if isinstance(data.prompt, str):
        return [*found, {"role": "user", "content": data.prompt}]
    given = [{"role": each.role, "content": content_text(each.content) or ""} for each in data.prompt or []]
    return [*found, *given] or [{"role": "user", "content": ""}]


class Episodes:
    """Plays the episodes that the training process starts; several episodes can run at the same time.

    A message has a kind and fields. Messages from the training process: `run` (episode, task), `answer` (call, status,
    body, stream), `stop` (episode) and `cancel` (episode). Messages to the training process: `ready`, `request`
    (episode, call, route, body) and `end` (episode, reward, ...). A call is one model request of an episode.
    """

    def __init__(self, env: Any, agent: Any):
        self._env = env
        self._agent = agent
        self._task_class = type(env.taskset).task_type()
        self._running: dict[int, asyncio.Task[None]] = {}
        self._traces: dict[int, Any] = {}
        self._of_trace: dict[str, int] = {}
        self._answers: dict[int, tuple[int | None, asyncio.Future[Mapping[str, Any]]]] = {}
        self._calls = itertools.count()
        self._key = secrets.token_urlsafe(32)

    async def run(self, channel: socket.socket) -> None:
        """Plays episodes, as requested on a socket, until the socket is closed."""
        os.environ[KEY_VARIABLE] = self._key
        for name in ("no_proxy", "NO_PROXY"):
            os.environ[name] = ",".join(filter(None, [os.environ.get(name), LOCAL, "localhost"]))
        channel.setblocking(False)
        requests, self._out = await asyncio.open_unix_connection(sock=channel)
        async with self._endpoint() as url, self._env.serving():
            self._context = self._model(url)
            self._send({"kind": "ready"})
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    (length,) = HEADER.unpack(await requests.readexactly(HEADER.size))
                    self._take(json.loads(await requests.readexactly(length)))
            for task in self._running.values():
                task.cancel()
            await asyncio.gather(*self._running.values(), return_exceptions=True)

    @contextlib.asynccontextmanager
    async def _endpoint(self) -> Any:
        """Serves the model requests of episodes at `ROUTES` on a free port of this machine, inside the
        `with` block. Yields the address up to `/v1`."""
        from aiohttp import web

        app = web.Application(client_max_size=1 << 30)
        for route in ROUTES:
            app.router.add_post(route, self._forward)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            site = web.TCPSite(runner, LOCAL, 0, backlog=2048)
            await site.start()
            yield f"http://{LOCAL}:{runner.addresses[0][1]}/v1"
        finally:
            await runner.cleanup()

    def _model(self, url: str) -> Any:
        from verifiers.v1.clients import EvalClientConfig, ModelContext

        return ModelContext(model=MODEL, client=EvalClientConfig(base_url=url, api_key_var=KEY_VARIABLE))

    async def _forward(self, http: Any) -> Any:
        """Answers an HTTP model request of an episode: sends it to the training process and returns the answer."""
        from aiohttp import web

        key = http.headers.get("x-api-key") or http.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(key, self._key):
            return web.json_response({"error": {"message": "the key is missing or wrong"}}, status=401)
        episode = self._of_trace.get(http.headers.get("x-session-id", ""))
        if episode is None and http.path != COUNT:  # verifiers does not say to which episode a count belongs
            return web.json_response({"error": {"message": "the request belongs to no running episode"}}, status=409)
        call = next(self._calls)
        body = await http.json()
        answer = asyncio.get_running_loop().create_future()
        self._answers[call] = episode, answer
        try:
            self._send({"kind": "request", "episode": episode, "call": call, "route": http.path, "body": body})
            found = await answer
        finally:
            self._answers.pop(call, None)
        if found["stream"]:
            return web.Response(text=found["body"], content_type="text/event-stream")
        return web.json_response(found["body"], status=found["status"])

    def _take(self, content: Mapping[str, Any]) -> None:
        kind = content["kind"]
        if kind == "run":
            task = asyncio.create_task(self._play(content["episode"], content["task"]))
            self._running[content["episode"]] = task
        elif kind == "answer":
            _, answer = self._answers.get(content["call"], (None, None))
            if answer is not None and not answer.done():
                answer.set_result(content)
        elif kind == "stop":
            if (trace := self._traces.get(content["episode"])) is not None:
                trace.stop("max_total_tokens")  # the episode so far is scored
        elif kind == "cancel" and (running := self._running.get(content["episode"])) is not None:
            running.cancel()

    async def _play(self, episode: int, data: Mapping[str, Any]) -> None:
        """Plays one episode with the task `data` and sends the message `end` to the training process."""

        def began(trace: Any) -> None:
            self._traces[episode] = trace
            self._of_trace[trace.id] = episode

        end: dict[str, Any] = {"kind": "end", "episode": episode, "reward": None, "metrics": {}, "stop": None}
        try:
            task = self._task_class(self._task_class.data_type().model_validate(data), self._env.config.taskset.task)
            (slot,) = self._env.slots(task)
            end |= _result(await self._env.run_slot(slot, self._context, on_trace=began))
        except asyncio.CancelledError:
            end["error"] = "the episode was cancelled"
        except Exception as error:
            end["error"] = _reason(error)
        finally:
            self._running.pop(episode, None)
            trace = self._traces.pop(episode, None)
            self._of_trace.pop(getattr(trace, "id", ""), None)
            for owner, answer in list(self._answers.values()):
                if owner == episode:
                    answer.cancel()
        self._send(end)

    def _send(self, content: Mapping[str, Any]) -> None:
        self._out.write(message(json.dumps(content).encode()))


def _result(episode: Any) -> dict[str, Any]:
    """Returns the reward, the metrics and the error (if any) of an episode that has ended."""
    if len(episode.traces) != 1:
        problem = f"{episode.last_error.type}: {episode.last_error.message}" if episode.last_error else None
        return {
            "error": problem
            or f"it has {len(episode.traces)} traces; only environments with one trace can be trained on"
        }
    (trace,) = episode.traces
    values = {name: each.value for name, each in trace.rewards.items() if each is not None} | {
        name: value for name, value in trace.metrics.items() if value is not None
    }
    found: dict[str, Any] = {
        "reward": trace.reward,
        "metrics": {name: float(value) for name, value in values.items() if math.isfinite(value)},
        "stop": trace.stop_condition,
    }
    if episode.ok and math.isfinite(trace.reward):
        return found
    error = trace.last_error or episode.last_error
    if error is not None:
        text = f"{error.type}: {error.message}" + (f"\n{error.traceback}" if error.traceback else "")
    else:
        text = f"the reward is {trace.reward}" if episode.ok else f"the episode has failed ({trace.stop_condition})"
    return found | {"error": text, "timeout": bool(trace.is_timeout or episode.is_timeout)}
