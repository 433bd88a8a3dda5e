"""Shows the newest metrics of a run to Prometheus, over HTTP.

The names follow from those of `metrics.jsonl` (`series`), so a new metric needs no entry here. `prometheus_client` is
imported when an endpoint is opened.
"""

from __future__ import annotations

import collections
import logging
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jax import local_devices

from tunix_like.errors import UserError, one_line
from tunix_like.storage.checkpoint_files import complete_steps
from tunix_like.storage.metrics import MetricsLog, Start, is_number

if TYPE_CHECKING:
    from prometheus_client import Metric

logger = logging.getLogger("tunix_like")

HOST = "127.0.0.1"

PORT = 9464  # of the Prometheus exporters of OpenTelemetry; `serve` and most web servers have others

_LABELS = tuple(
    re.compile(pattern)
    for pattern in (
        r".+@(?P<k>\d+)(?:/(?P<source>.+))?",  # eval/pass@8, train/pass@1/gsm8k
        r".+/rewards/mean/(?P<source>.+)",
        r".+/schedule/(?P<source>.+)/[^/]+",
        r".+/(?:sampler_)?time/(?P<part>\w+)",
        r".+/turns/reward/(?P<turn>\d+)",
        r".+/reward/(?P<function>.+)/\w+",  # train/reward/judge/calls
        r"device/(?P<device>\d+)/\w+",
    )
)
"""Metrics whose names contain the values of labels."""

_COUNTS = re.compile(r".+/reward/.+/\w+")
"""Metrics that are numbers since the previous row. Prometheus gets their sums, because it does not read every row."""

_FAULTS = re.compile(r".+/(?:(?:update|critic)/(?:skipped|empty)|reward/\w+_frac)")
"""Shares of a step whose steps above 0 are also counted, because Prometheus can miss the row of such a step."""

_MEMORY = ("bytes_in_use", "peak_bytes_in_use", "bytes_limit")


class Series(NamedTuple):
    """The name of a metric and its labels in Prometheus."""

    name: str
    labels: tuple[tuple[str, str], ...]


def series(name: str) -> Series:
    """Returns the series of a metric of `metrics.jsonl`: values of labels are taken out of the name, `@` becomes `_at`,
    and what Prometheus does not allow `_`. `eval/pass@8/gsm8k` becomes `tunix_like_eval_pass_at` with `k` 8 and
    `source` gsm8k."""
    match = next(filter(None, (pattern.fullmatch(name) for pattern in _LABELS)), None)
    labels = {} if match is None else {key: value for key, value in match.groupdict().items() if value is not None}
    text = name
    for key in reversed(labels):  # from the end of the name, so that the earlier positions stay
        assert match is not None
        text = text[: match.start(key)] + text[match.end(key) :]
    text = re.sub(r"[^a-zA-Z0-9]+", "_", text.replace("@", "_at"))
    return Series(f"tunix_like_{text.strip('_')}", tuple(labels.items()))


class Values(NamedTuple):
    """What a scrape shows, by the names of `metrics.jsonl`. It is replaced as a whole, so that a scrape, which another
    thread answers, sees complete rows."""

    gauges: dict[str, float]
    counters: dict[str, float]


class MetricsServer:
    """Serves the newest value of each metric of a training phase, its counters since the start of this object, and the
    memory of the process and of its devices.

    Args:
      folder: the run folder, whose name is the label `run`. Nothing else of the configuration is shown.
      total: the planned number of steps.
      checkpoints: the name of the folder of checkpoints in `folder`.
    """

    def __init__(self, folder: Path | None, total: int | None, checkpoints: str) -> None:
        self._folder = folder
        self._run = "" if folder is None else folder.absolute().name
        self._total = total
        self._checkpoints = checkpoints
        self._values = Values({}, {})
        self._server: Any = None

    def __str__(self) -> str:
        return "prometheus"

    def open(self) -> None:
        """Starts to listen.

        Raises:
          UserError: the address is invalid or in use, or `prometheus_client` cannot be imported.
        """
        try:
            from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
        except ImportError as error:
            raise UserError(
                f"training.loggers: prometheus needs a package that cannot be imported ({one_line(error)}): pip "
                "install 'tunix-like[prometheus]', or leave it out."
            ) from None
        registry = CollectorRegistry()  # the global one would mix the runs of this process
        registry.register(self)
        ProcessCollector("tunix_like", registry=registry)
        host = os.environ.get("PROMETHEUS_HOST", HOST)
        port = _port(os.environ.get("PROMETHEUS_PORT", str(PORT)))
        try:
            self._server, _ = start_http_server(port, host, registry)
        except OSError as error:
            raise UserError(
                f"training.loggers: prometheus cannot listen on port {port} of {host} ({error.strerror or error}). Set "
                "the environment variable PROMETHEUS_PORT to a free port (0: any), or leave prometheus out."
            ) from None
        shown = f"[{host}]" if ":" in host else host
        logger.info("metrics for Prometheus: http://%s:%d/metrics", shown, self._server.server_port)

    def begin(self, start: Start) -> None:
        newest = MetricsLog(self._folder).newest(start.key)
        shown = {name: value for name, value in newest.items() if is_number(value) and not _COUNTS.fullmatch(name)}
        self._values = Values(shown, {})

    def write(self, number: int, row: Mapping[str, Any]) -> None:
        gauges = {name: value for name, value in self._values.gauges.items() if name not in row}
        counters = collections.defaultdict(float, self._values.counters)
        for name, value in row.items():
            if not is_number(value):
                continue
            if _COUNTS.fullmatch(name):
                counters[name] += value
                continue
            gauges[name] = value
            if _FAULTS.fullmatch(name):
                counters[f"{name}_steps"] += value > 0
        self._values = Values(gauges, counters)

    def close(self, failed: bool) -> None:
        self._server.shutdown()
        self._server.server_close()

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics of a scrape. If two names become the same series, which Prometheus would reject, only the
        first is shown."""
        from prometheus_client import Metric

        values = self._values
        families: dict[str, Metric] = {}
        seen = set[Series]()
        for kind, numbers in (("gauge", values.gauges | self._state()), ("counter", values.counters)):
            for name, value in numbers.items():
                found = series(name)
                family = families.setdefault(found.name, Metric(found.name, f"{name} of the run", kind))
                if found not in seen and family.type == kind:
                    seen.add(found)
                    suffix = "_total" if kind == "counter" else ""
                    family.add_sample(found.name + suffix, dict(found.labels) | {"run": self._run}, value)
        yield from families.values()

    def _state(self) -> dict[str, float]:
        """Returns what no row of `metrics.jsonl` has."""
        state: dict[str, float] = {} if self._total is None else {"total_steps": self._total}
        if self._folder is not None and (steps := complete_steps(self._folder / self._checkpoints)):
            state["checkpoint_step"] = steps[-1]
        for index, device in enumerate(local_devices()):
            known = device.memory_stats() or {}
            state |= {f"device/{index}/{name}": known[name] for name in _MEMORY if name in known}
        return state


def _port(text: str) -> int:
    if re.fullmatch("[0-9]{1,5}", text) and int(text) < 65536:
        return int(text)
    raise UserError(
        f"training.loggers: PROMETHEUS_PORT is {text!r:.40}; set it to a port from 0 (any free port) to 65535."
    )
