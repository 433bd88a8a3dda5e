"""Tests that completions of the batcher equal those of the sampler, whatever is computed in the same batch."""

from __future__ import annotations

import queue
import time

import jax
import numpy as np
import pytest

from tests.serving.served import random_model
from tunix_like.config.schema import MeshConfig
from tunix_like.models.fields import DeltaRule
from tunix_like.models.sharding import build_mesh, place_params
from tunix_like.rollout import decoding
from tunix_like.rollout.requests import collect
from tunix_like.rollout.sampler import Sampler
from tunix_like.serving import batcher, programs
from tunix_like.serving.batcher import Batcher
from tunix_like.serving.runner import Job, JobSampling, Runner, Weights
from tunix_like.types import Request, SamplingParams

VOCABULARY, EOS = 20, 4
GRAPHDEF, PARAMS = random_model(VOCABULARY)


class Run:
    """A batcher and the completions that it returns."""

    def __init__(self, rows=6, longest=200, eos_ids=(EOS,), mesh=None, model=(GRAPHDEF, PARAMS), warm_up=False):
        params = place_params(model[1], mesh)
        self.parts = queue.Queue()
        self.runner = Runner(Weights(model[0], params, eos_ids, mesh), rows, longest)
        self.batcher = Batcher(self.runner, lambda parts: [self.parts.put(part) for part in parts])
        self.batcher.start(warm_up)

    def finish(self, jobs, submit=True):
        """Submits jobs; returns tokens, log-probabilities and reason by job and sample."""
        if submit:
            self.batcher.submit(jobs)
        found = {(job, sample): ([], [], []) for job in jobs for sample in range(job.count)}
        while not all(reasons for _, _, reasons in found.values()):
            job, part = self.parts.get(timeout=120)
            tokens, logprobs, reasons = found[job, part.sample]
            assert not reasons, "nothing comes after the end"
            tokens += part.tokens
            logprobs += part.logprobs
            reasons += [part.reason] if part.reason else []
        return {place: (tokens, logprobs, reasons[0]) for place, (tokens, logprobs, reasons) in found.items()}


@pytest.fixture
def run():
    made = []

    def make(**options):
        made.append(Run(**options))
        return made[-1]

    yield make
    for each in made:
        each.batcher.close()


def many_jobs(count, rng, longest_prompt=150):
    """Returns jobs with different lengths, numbers of completions and sampling parameters."""
    for _ in range(count):
        prompt = rng.integers(0, VOCABULARY, rng.integers(1, longest_prompt)).tolist()
        sampling = JobSampling(
            max_tokens=int(rng.integers(1, 200 - len(prompt))),
            temperature=float(rng.choice([0, 0.7, 1.0])),
            top_p=float(rng.choice([1, 0.8])),
            top_k=(None, 3)[rng.integers(2)],
            seed=int(rng.integers(1 << 32)),
        )
        yield Job(prompt, int(rng.integers(1, 5)), sampling)


def alone(job: Job, eos_ids=(EOS,), model=(GRAPHDEF, PARAMS)):
    """Returns the completions of a job from the sampler of the trainer."""
    sampling = job.sampling
    made = Sampler(model[0], eos_ids, max_prompt_length=600, max_tokens=sampling.max_tokens)
    warm = SamplingParams(sampling.temperature, sampling.top_p, sampling.top_k)
    requests = [Request(job.prompt, job.number, job.count)]
    return collect(made.generate(model[1], requests, jax.random.key(sampling.seed), warm), requests)


def check(found, jobs, **model):
    for job in jobs:
        expected = alone(job, **model)
        for sample in range(job.count):
            tokens, logprobs, reason = found[job, sample]
            length = expected.lengths[0, sample]
            assert tokens == expected.tokens[0, sample, :length].tolist()
            np.testing.assert_allclose(logprobs, expected.logprobs[0, sample, :length], rtol=0, atol=1e-4)
            assert reason == ("stop" if expected.finished[0, sample] else "length")


@pytest.mark.slow
@pytest.mark.parametrize("steps", [3, programs.MOST_STEPS])
def test_completions_are_those_of_the_sampler(run, monkeypatch, steps):
    """There are few rows, so that completions wait and join running batches, and caches grow and shrink."""
    monkeypatch.setattr(batcher, "MOST_STEPS", steps)
    monkeypatch.setattr(programs, "FIRST_WIDTH", 32)
    jobs = list(many_jobs(16, np.random.default_rng(3)))
    made = run()
    assert made.runner.widths == [32, 128, 200]
    half = len(jobs) // 2
    found = made.finish(jobs[:half]) | made.finish(jobs[half:])
    check(found, jobs)
    assert (made.batcher.running, made.batcher.waiting) == (0, 0)


@pytest.mark.slow
def test_rows_of_a_mesh_are_those_of_one_device(run):
    mesh = build_mesh(MeshConfig(shape=[2, 2]), jax.devices()[:4])
    jobs = list(many_jobs(4, np.random.default_rng(5), 40))
    check(run(rows=4, longest=200, mesh=mesh).finish(jobs), jobs)


@pytest.mark.slow
def test_recurrent_layers(run):
    """Rows that are used again start from the memory of their new prompt. A long prompt that begins like an earlier one
    is computed whole, because a recurrent layer keeps no memory of the middle of a prompt."""
    model = random_model(VOCABULARY, delta_rule=DeltaRule(1, 2, 8, 8, 4), recurrent_layers=(True, False))
    rng = np.random.default_rng(3)
    jobs, first = list(many_jobs(6, rng, 40)), rng.integers(0, VOCABULARY, 500).tolist()
    jobs += [Job(first[:count], 2, JobSampling(8, temperature=1.0, seed=4)) for count in (500, 499, 300)]
    made = run(rows=3, longest=600, model=model)
    check(made.finish(jobs[:7]) | made.finish(jobs[7:]), jobs, model=model)


def test_a_prompt_is_computed_once_for_its_completions(run, monkeypatch):
    made, seen = run(rows=3), []
    prefill = made.runner.prefill
    monkeypatch.setattr(made.runner, "prefill", lambda prompts, width: seen.extend(prompts) or prefill(prompts, width))
    job = Job([1, 2, 3], 10, JobSampling(20, seed=8))
    check(made.finish([job]), [job])
    assert seen == [(1, 2, 3)]


@pytest.mark.slow
def test_prompts_that_arrive_together_are_computed_together(run, monkeypatch):
    made, seen = run(rows=8), []
    prefill = made.runner.prefill
    monkeypatch.setattr(
        made.runner, "prefill", lambda prompts, width: seen.append((len(prompts), width)) or prefill(prompts, width)
    )
    jobs = [Job([1] * length, 1, JobSampling(4)) for length in (3, 5, 7, 20, 31, 40, 150)]
    made.finish(jobs)
    assert seen == [(6, 64), (1, 200)]


def test_equal_prompts_that_arrive_together_are_computed_once(run, monkeypatch):
    made, seen = run(rows=8), []
    prefill = made.runner.prefill
    monkeypatch.setattr(made.runner, "prefill", lambda prompts, width: seen.append(prompts) or prefill(prompts, width))
    first, second = (1, 2, 3), (1, 2, 4)
    jobs = [Job(prompt, 1, JobSampling(20, seed=seed)) for seed, prompt in enumerate([first] * 5 + [second])]
    check(made.finish(jobs), jobs)
    assert seen == [[first], [second]]
    assert [job.reused for job in jobs] == [0, 3, 3, 3, 3, 0]


@pytest.mark.slow
def test_different_seeds_and_numbers_give_different_completions(run):
    jobs = [Job([1, 2], 1, JobSampling(30, seed=seed), number) for seed in (1, 2, 1 << 40) for number in (0, 1)]
    found = run(eos_ids=()).finish(jobs)
    assert len({tuple(tokens) for tokens, _, _ in found.values()}) == len(jobs)


def test_a_stop_id_ends_a_completion(run):
    job = Job([1, 2, 3], 2, JobSampling(40, seed=3))
    whole = run(eos_ids=()).finish([job])
    stop = whole[job, 0][0][10]
    short = Job([1, 2, 3], 2, JobSampling(40, seed=3, stop_ids=frozenset([stop])))
    found = run(eos_ids=()).finish([short])
    for sample in (0, 1):
        tokens = whole[job, sample][0]
        length = tokens.index(stop) + 1 if stop in tokens else 40
        assert found[short, sample][0] == tokens[:length]
        assert found[short, sample][2] == ("stop" if stop in tokens else "length")


@pytest.mark.slow
def test_cancelled_completions_free_their_rows(run):
    made = run(rows=2, longest=4000, eos_ids=())
    long = [Job([1], 2, JobSampling(3990)), Job([2], 1, JobSampling(3990))]
    made.batcher.submit(long)
    while made.batcher.running < 2:
        time.sleep(0.01)
    assert made.batcher.waiting == 1
    made.batcher.cancel(long[1])
    made.batcher.cancel(long[0], 1)
    while made.batcher.running > 1:
        time.sleep(0.01)
    assert made.batcher.waiting == 0
    made.batcher.cancel(long[0])
    job = Job([3, 4], 3, JobSampling(30, seed=1))
    made.batcher.submit([job])
    tokens = {sample: [] for sample in range(3)}
    ended = 0
    while ended < 3:
        source, part = made.parts.get(timeout=60)
        if source is job:
            tokens[part.sample] += part.tokens
            ended += part.reason is not None
        assert part.reason is None or source is job, "cancelled completions have no end"
    expected = alone(job, eos_ids=())
    assert [tokens[sample] for sample in range(3)] == expected.tokens[0].tolist()
    assert made.batcher.running == made.batcher.waiting == 0


def test_an_error_fails_the_requests_and_not_the_server(run, monkeypatch):
    made = run(rows=2)
    advance = made.runner.advance
    calls = []

    def broken(*given):
        calls.append(given)
        if len(calls) == 2:
            raise RuntimeError("no memory")
        return advance(*given)

    monkeypatch.setattr(batcher, "MOST_STEPS", 2)
    monkeypatch.setattr(made.runner, "advance", broken)
    jobs = [Job([1, 2], 3, JobSampling(60)), Job([5], 1, JobSampling(60))]
    found = made.finish(jobs)
    assert {reason for _, _, reason in found.values()} <= {"error", "stop"}
    assert [reason for _, _, reason in found.values()].count("error") >= 2
    good = Job([1, 2, 3], 2, JobSampling(20, seed=4))
    check(made.finish([good]), [good])


def test_a_failed_start_fails_its_completions(run, monkeypatch):
    made = run(rows=2)
    start, calls = made.runner.start, []

    def broken(places):
        calls.append(places)
        if len(calls) == 1:
            raise RuntimeError("no memory")
        start(places)

    monkeypatch.setattr(made.runner, "start", broken)
    found = made.finish([Job([1, 2], 3, JobSampling(60))])
    assert [reason for _, _, reason in found.values()] == ["error"] * 3
    good = Job([1, 2, 3], 2, JobSampling(20, seed=4))
    check(made.finish([good]), [good])


def test_failed_allocation_of_arrays_does_not_end_the_thread(run, monkeypatch):
    """The thread continues. Requests are answered with an error until memory is available."""
    made = run(rows=2)
    reset, tried = made.runner.reset, []

    def refused():
        tried.append(1)
        if len(tried) < 3:
            raise RuntimeError("no memory")
        reset()

    def broken(*given):
        monkeypatch.undo()
        monkeypatch.setattr(made.runner, "reset", refused)
        raise RuntimeError("no memory")

    monkeypatch.setattr(made.runner, "advance", broken)
    for _ in range(3):
        found = made.finish([Job([1, 2], 1, JobSampling(5))])
        assert [reason for _, _, reason in found.values()] == ["error"]
    good = Job([1, 2, 3], 2, JobSampling(20, seed=4))
    check(made.finish([good]), [good])


def test_requests_are_answered_between_the_shapes_of_the_warm_up(run, monkeypatch):
    """Also a request whose prompt is a single token, as are those of the warm-up."""
    rng, warm_up, jobs, running = np.random.default_rng(3), Runner.warm_up, list[Job](), list[Run]()

    def with_requests(runner):
        for _ in warm_up(runner):
            prompt = rng.integers(0, VOCABULARY, rng.choice([1, 40])).tolist()
            jobs.append(Job(prompt, 2, JobSampling(12, seed=5)))
            while not running:
                time.sleep(0.01)
            running[0].batcher.submit(jobs[-1:])  # from the thread that samples
            yield

    monkeypatch.setattr(Runner, "warm_up", with_requests)
    made = run(rows=4, longest=60, warm_up=True)
    running.append(made)
    while not jobs or made.batcher.waiting or made.batcher.running or made.batcher._shapes is not None:
        time.sleep(0.01)
    check(made.finish(jobs, submit=False), jobs)
    assert len(jobs) > 3


@pytest.mark.slow
def test_warm_up_compiles_everything(run, monkeypatch):
    """After the warm-up, no job compiles a program."""
    monkeypatch.setattr(programs, "SHORTEST_CHUNK", 32)
    made = run(rows=8, longest=150)
    list(made.runner.warm_up())
    watched = [programs.advance, programs._place, programs._begin, programs.resized_prompts, programs._resized_rows]
    watched += [decoding.prefill, programs.continue_prompt]
    before = [each._cache_size() for each in watched]
    jobs = list(many_jobs(12, np.random.default_rng(9), 100))
    jobs = [Job(job.prompt, job.count, JobSampling(min(job.sampling.max_tokens, 50), seed=1)) for job in jobs]
    jobs += [Job([1] * length, 1, JobSampling(4)) for length in (140, 60, 144, 146, 62)]
    made.finish(jobs)
    assert sum(job.reused for job in jobs) > 0
    assert [each._cache_size() for each in watched] == before
