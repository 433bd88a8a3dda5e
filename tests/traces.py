"""Reads `trace.json` as a reader of Chrome trace events does."""

from __future__ import annotations

import collections
import json
from pathlib import Path
from typing import Any

Tracks = dict[str, list[dict[str, Any]]]


def tracks_of(file: Path) -> Tracks:
    """Returns the events of each track by its name, in the order of their starts. Checks that events of a track are
    disjoint or lie within each other, because Perfetto drops others."""
    events = json.loads(file.read_text())
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert len(set(names.values())) == len(names)
    tracks: Tracks = collections.defaultdict(list)
    for event in sorted((e for e in events if e["ph"] == "X"), key=lambda e: e["ts"]):  # stable, as in Perfetto
        tracks[names[event["pid"], event["tid"]]].append(event)
    for track in tracks.values():
        ends: list[int] = []
        for event in track:
            assert event["dur"] >= 0
            while ends and ends[-1] <= event["ts"]:
                ends.pop()
            assert not ends or event["ts"] + event["dur"] <= ends[-1], event
            ends.append(event["ts"] + event["dur"])
    return tracks


def named(track: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [event for event in track if event["name"] == name]


def seconds(events: list[dict[str, Any]]) -> float:
    return sum(event["dur"] for event in events) / 1e6


def calls(tracks: Tracks, group: str) -> list[dict[str, Any]]:
    """Returns the events of all tracks of a group."""
    return [event for name, track in tracks.items() if name.startswith(group) for event in track]
