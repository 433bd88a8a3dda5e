"""Counts requests, tokens and durations, and writes the counts in the text format of Prometheus."""

from __future__ import annotations

import bisect
import collections
from collections.abc import Mapping, Sequence

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Upper bounds of the buckets of a histogram, in seconds."""

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Histogram:
    """Counts durations in buckets with the upper bounds `SECONDS`, and longer durations in a last bucket."""

    def __init__(self) -> None:
        self.counts = [0] * (len(SECONDS) + 1)
        self.sum = 0.0

    def add(self, seconds: float) -> None:
        """Counts one duration, in seconds."""
        self.counts[bisect.bisect_left(SECONDS, seconds)] += 1
        self.sum += seconds

    def lines(self, name: str) -> Sequence[str]:
        """Returns the lines of the histogram in the text format of Prometheus."""
        total, found = 0, []
        for bound, count in zip((*SECONDS, "+Inf"), self.counts, strict=True):
            total += count
            found.append(f'{name}_bucket{{le="{bound}"}} {total}')
        return [*found, f"{name}_sum {self.sum:.6f}", f"{name}_count {total}"]


class Metrics:
    """The metrics of a server. Only the thread of the event loop changes these metrics."""

    def __init__(self) -> None:
        self.requests: collections.Counter[tuple[str, int]] = collections.Counter()
        self.prompt_tokens = self.generated_tokens = 0
        self.latency, self.first_token = Histogram(), Histogram()

    def text(self, gauges: Mapping[str, tuple[str, float]]) -> str:
        """Returns all metrics as text. `gauges` maps the names of further metrics to their description and current
        value."""
        lines: list[str] = []

        def metric(name: str, kind: str, what: str, values: Sequence[str]) -> None:
            lines.extend((f"# HELP {name} {what}", f"# TYPE {name} {kind}", *values))

        counted = [
            f'tunix_like_requests_total{{route="{route}",status="{status}"}} {count}'
            for (route, status), count in sorted(self.requests.items())
        ]
        metric("tunix_like_requests_total", "counter", "Answered requests by route and HTTP status.", counted)
        for name, what, value in (
            ("prompt_tokens", "Tokens of the prompts of accepted requests.", self.prompt_tokens),
            ("generated_tokens", "Sampled tokens.", self.generated_tokens),
        ):
            metric(f"tunix_like_{name}_total", "counter", what, [f"tunix_like_{name}_total {value}"])
        for name, (what, number) in gauges.items():
            metric(f"tunix_like_{name}", "gauge", what, [f"tunix_like_{name} {number:g}"])
        for name, what, histogram in (
            ("request_seconds", "Time from a request to the end of its answer.", self.latency),
            ("first_token_seconds", "Time from a request to its first token.", self.first_token),
        ):
            metric(f"tunix_like_{name}", "histogram", what, histogram.lines(f"tunix_like_{name}"))
        return "\n".join(lines) + "\n"
