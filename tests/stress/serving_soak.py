"""Sends ten thousand small requests of all kinds to a server, and measures resources that must not grow.

    python tests/stress/serving_soak.py [--requests 10000] [--seconds 1800]

Not a part of the test suite: it takes some minutes, and needs Linux (`/proc`). The server is a separate process with a
random model of letters, on loopback only. Sixteen clients send whole and streamed requests. Some requests are
malformed, too large, or cancelled before the answer. Greedy answers are compared with the first answer to the same
prompt. Exit status 0: every request got its answer, and memory, open files and threads do not grow after the first
fifth.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

import tunix_like
from tunix_like.data import reverse_text

HF = {
    "model_type": "qwen2", "vocab_size": 13, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip
CLIENTS = 16
GROWTH = 0.03
"""The fraction by which the resident memory may grow after the first fifth of the requests."""


def start(folder: Path) -> tuple[subprocess.Popen[str], str]:
    """Starts the server. Returns its process and address."""
    model, _ = tunix_like.load_model(HF, init="random")
    tunix_like.export_model(model, reverse_text.tokenizer(), folder / "letters")
    command = [sys.executable, "-m", "tunix_like", "serve", "letters", "--port", "0", "--max-rows", "8"]
    process = subprocess.Popen([*command, "--max-length", "120"], cwd=folder, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        print(line, end="")
        if found := re.match(r"serving letters at (http://\S+)/v1$", line):
            return process, found[1]
    raise SystemExit("the server did not start")


def look(pid: int) -> tuple[int, int, int]:
    """Returns the resident bytes, open files and threads of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    resident, threads = (int(re.search(rf"^{name}:\s+(\d+)", status, re.M)[1]) for name in ("VmRSS", "Threads"))
    return resident * 1024, len(os.listdir(f"/proc/{pid}/fd")), threads


class Soak:
    """The clients and their results."""

    def __init__(self, pid: int, url: str, requests: int, seconds: float):
        self.pid, self.url, self.left, self.until = pid, url, requests, time.monotonic() + seconds
        self.total, self.wrong, self.first = requests, [], {}
        self.looks: list[tuple[int, tuple[int, int, int]]] = []
        self.random = random.Random(0)

    async def run(self) -> None:
        """Sends all requests."""
        async with httpx.AsyncClient(base_url=self.url, timeout=120) as http:
            await asyncio.gather(*(self.client(http) for _ in range(CLIENTS)))

    async def client(self, http: httpx.AsyncClient) -> None:
        """Sends requests until none are left or the time has passed."""
        while self.left > 0 and time.monotonic() < self.until:
            self.left -= 1
            done = self.total - self.left
            if done % 250 == 0:
                self.looks.append((done, look(self.pid)))
                print(f"{done:>6} requests  {self.looks[-1][1][0] / 2**20:8.1f} MiB  files {self.looks[-1][1][1]}")
            problem = await self.one(http, self.random.random())
            if problem is not None:
                self.wrong.append(problem)

    async def one(self, http: httpx.AsyncClient, kind: float) -> str | None:
        """Sends one request. Returns the error of its answer, if any."""
        prompt = "".join(self.random.choice("abc") for _ in range(self.random.randint(1, 4))) + ">"
        body = {"prompt": prompt, "max_tokens": 12, "temperature": 0}
        if kind < 0.05:
            answer = await http.post("/v1/completions", json=body | {"max_tokens": 500})
            return None if answer.status_code == 400 else f"{answer.status_code} for an oversized request"
        if kind < 0.1:
            answer = await http.post("/v1/completions", content=b"{", headers={"content-type": "application/json"})
            return None if answer.status_code == 400 else f"{answer.status_code} for a malformed request"
        if kind < 0.15:
            with contextlib.suppress(httpx.TimeoutException):
                await http.post("/v1/completions", json=body | {"max_tokens": 100, "n": 4}, timeout=0.01)
            return None
        if kind < 0.4:
            answer = await http.post("/v1/completions", json=body | {"stream": True})
            text = "".join(re.findall(r'"text":"([^"]*)"', answer.text))
        else:
            answer = await http.post("/v1/completions", json=body)
            text = answer.json()["choices"][0]["text"] if answer.status_code == 200 else ""
        if answer.status_code != 200:
            return f"{answer.status_code}: {answer.text[:200]}"
        return None if self.first.setdefault(prompt, text) == text else f"{prompt}: {text} and {self.first[prompt]}"


def main() -> int:
    """Prints a line every 250 requests and the result. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=1800)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        process, url = start(Path(folder))
        try:
            soak = Soak(process.pid, url, arguments.requests, arguments.seconds)
            began = time.monotonic()
            asyncio.run(soak.run())
            print(f"{soak.total - soak.left} requests in {time.monotonic() - began:.0f} s")
            last = look(process.pid)
            process.terminate()
            status = process.wait(timeout=60)
        finally:
            process.kill()
    settled = next(seen for done, seen in soak.looks if done >= soak.total / 5)
    verdicts = {
        f"every request got its answer ({len(soak.wrong)} wrong: {soak.wrong[:3]})": not soak.wrong,
        f"all requests were sent ({soak.left} left)": soak.left == 0,
        f"memory is flat ({settled[0] / 2**20:.1f} to {last[0] / 2**20:.1f} MiB)": last[0] <= settled[0] * (1 + GROWTH),
        f"open files are flat ({settled[1]} to {last[1]})": last[1] <= settled[1] + CLIENTS,
        f"threads are flat ({settled[2]} to {last[2]})": last[2] <= settled[2] + 2,
        f"the exit status is 0 (it is {status})": status == 0,
    }
    for verdict, good in verdicts.items():
        print(f"{'kept  ' if good else 'BROKEN'} {verdict}")
    return 0 if all(verdicts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
