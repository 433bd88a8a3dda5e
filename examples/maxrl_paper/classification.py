"""MaxRL becomes maximum likelihood: a classifier trained by cross-entropy and by sampled 0/1 rewards.

    python examples/maxrl_paper/classification.py --out FOLDER

After the image classification of the MaxRL paper (arXiv 2602.02710), with synthetic inputs. A prompt is an input, a
completion one sampled class, the reward 1 for the right class: the log-likelihood of success is the log-likelihood of
the label, so that here, other than in text, maximum likelihood itself can be run beside its approximations. Groups of N
samples; the advantages are those of the library's estimators. Writes `classification.json` (all curves, all learning
rates) and `maxrl_classification.png`, and prints the tables of docs/studies.md; about four minutes of processor time.

The task: 256 Gaussian classes around random centres in 16 dimensions, seen through a random nonlinear map of 64
outputs; 20 training inputs a class. The initial pass rate is about 1/256 everywhere. Each seed draws its own task,
initial weights and batches, which all methods share, and so is the optimizer (Adam, learning rate falling linearly to
0); the learning rate of each method and N is the best of one grid, by validation accuracy on a task of another seed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from classification_tables import EXACT, MEASURED, draw, gradients_table, results_table, tuning_table
from flax import nnx
from jaxtyping import Array, Float, Int

from tunix_like.algorithms.objective import GroupEstimator
from tunix_like.algorithms.population_weights import weights_of

ESTIMATORS = {"MaxRL": "maxrl", "GRPO": "grpo", "REINFORCE": "rloo"}
"""REINFORCE has the mean reward of the group's other samples as its baseline: same expectation, less noise."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """One study. `held_out` inputs each for validation, test and the training NLL; at the steps `snapshots` of the
    first cross-entropy run gradients are compared, of `compared` inputs, with `draws` sampled ones of each estimator.
    `steps` is a multiple of `evaluations`, and the snapshots are steps of an evaluation."""

    classes: int = 256
    latent: int = 16
    inputs: int = 64
    hidden: int = 128
    noise: float = 0.6
    train_per_class: int = 20
    held_out: int = 2000
    batch: int = 64
    steps: int = 600
    evaluations: int = 20
    sizes: tuple[int, ...] = (16, 128, 1024)
    learning_rates: tuple[float, ...] = (3e-4, 1e-3, 3e-3, 1e-2)
    tuning_seed: int = 100
    seeds: tuple[int, ...] = (0, 1, 2)
    snapshots: tuple[int, ...] = (0, 30, 90, 600)
    compared: int = 256
    draws: int = 4


class Examples(NamedTuple):
    inputs: Float[Array, "B D"]
    labels: Int[Array, "B"]


class Task(NamedTuple):
    train: Examples
    validation: Examples
    test: Examples


class Classifier(nnx.Module):
    """Inputs to logits, by one hidden layer."""

    def __init__(self, setting: Setting, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(setting.inputs, setting.hidden, rngs=rngs)
        self.out = nnx.Linear(setting.hidden, setting.classes, rngs=rngs)

    def __call__(self, inputs: Float[Array, "B D"]) -> Float[Array, "B C"]:
        return self.out(nnx.relu(self.hidden(inputs)))


@dataclasses.dataclass(frozen=True)
class Method:
    """A way to train: exact cross-entropy (no `size`), or an estimator on groups of `size` samples."""

    name: str
    size: int | None = None

    @property
    def label(self) -> str:
        return self.name if self.size is None else f"{self.name}, N = {self.size}"

    @property
    def estimator(self) -> GroupEstimator:
        return GroupEstimator(ESTIMATORS[self.name], {})


def methods(setting: Setting) -> list[Method]:
    return [Method(EXACT), *(Method(name, size) for name in ESTIMATORS for size in setting.sizes)]


def make_task(setting: Setting, seed: int) -> Task:
    """Noisy latent points around each class's centre, through `tanh` of a random affine map."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(setting.classes, setting.latent))
    view = rng.normal(size=(setting.latent, setting.inputs)) / np.sqrt(setting.latent)
    shift = rng.normal(size=setting.inputs)

    def examples(labels: np.ndarray) -> Examples:
        points = centres[labels] + setting.noise * rng.normal(size=(len(labels), setting.latent))
        return Examples(jnp.asarray(np.tanh(points @ view + shift), jnp.float32), jnp.asarray(labels, jnp.int32))

    train = rng.permutation(np.repeat(np.arange(setting.classes), setting.train_per_class))
    held_out = [rng.integers(setting.classes, size=setting.held_out) for _ in range(2)]
    return Task(examples(train), *map(examples, held_out))


def make_model(setting: Setting, seed: int) -> tuple[nnx.GraphDef, nnx.State]:
    return nnx.split(Classifier(setting, nnx.Rngs(seed)))


def sample_classes(key: Array, logprobs: Float[Array, "B C"], size: int) -> Int[Array, "B N"]:
    """Independent classes from each row, by inverting its cumulative distribution: one uniform number per sample."""
    cumulative = jnp.cumsum(jnp.exp(logprobs), axis=1)
    uniform = jax.random.uniform(key, (logprobs.shape[0], size)) * cumulative[:, -1:]
    found = jax.vmap(functools.partial(jnp.searchsorted, side="right"))(cumulative, uniform)
    return jnp.minimum(found, logprobs.shape[1] - 1)


def surrogate(
    estimator: GroupEstimator, logprobs: Float[Array, "B C"], labels: Int[Array, "B"], samples: Int[Array, "B N"]
) -> Float[Array, ""]:
    """`-(1/N) sum_i A_i log pi(y_i | x)`, averaged over inputs: its gradient is the policy gradient."""
    rewards = (samples == labels[:, None]).astype(jnp.float32)
    advantages = estimator(rewards, jnp.ones(rewards.shape, bool), jnp.ones(rewards.shape, jnp.int32))
    return -(advantages * jnp.take_along_axis(logprobs, samples, axis=1)).mean()


def loss(method: Method, graphdef: nnx.GraphDef, params: nnx.State, batch: Examples, key: Array) -> Float[Array, ""]:
    """What one step descends: cross-entropy, or the surrogate of freshly sampled groups."""
    logprobs = jax.nn.log_softmax(nnx.merge(graphdef, params)(batch.inputs))
    if method.size is None:
        return -jnp.take_along_axis(logprobs, batch.labels[:, None], axis=1).mean()
    samples = sample_classes(key, jax.lax.stop_gradient(logprobs), method.size)
    return surrogate(method.estimator, logprobs, batch.labels, samples)


step_gradient = functools.partial(jax.jit, static_argnums=(0, 1))(jax.grad(loss, argnums=2))
"""Of `loss`, by the weights; compiled once for each method."""


def make_chunk(setting: Setting, method: Method, graphdef: nnx.GraphDef) -> Callable[..., Any]:
    """`(params, moments, train, seed, learning_rate, start) -> params, moments`: one evaluation's worth of steps."""
    adam = optax.scale_by_adam()

    def step(carry: tuple, number: Array, train: Examples, seed: Array, learning_rate: Array) -> tuple:
        params, moments = carry
        which, key = jax.random.split(jax.random.fold_in(jax.random.key(seed), number))
        rows = jax.random.randint(which, (setting.batch,), 0, len(train.labels))
        batch = jax.tree.map(lambda values: values[rows], train)
        gradient = step_gradient(method, graphdef, params, batch, key)
        updates, moments = adam.update(gradient, moments)
        rate = learning_rate * (1 - number / setting.steps)
        return (jax.tree.map(lambda value, update: value - rate * update, params, updates), moments), None

    @jax.jit
    def chunk(params, moments, train, seed, learning_rate, start):
        numbers = start + jnp.arange(setting.steps // setting.evaluations)
        one = functools.partial(step, train=train, seed=seed, learning_rate=learning_rate)
        return jax.lax.scan(one, (params, moments), numbers)[0]

    return chunk


@functools.partial(jax.jit, static_argnums=0)
def _scores(graphdef: nnx.GraphDef, params: nnx.State, examples: Examples) -> tuple[Array, Array, Array]:
    logprobs = jax.nn.log_softmax(nnx.merge(graphdef, params)(examples.inputs))
    right = jnp.take_along_axis(logprobs, examples.labels[:, None], axis=1)[:, 0]
    return (logprobs.argmax(axis=1) == examples.labels).mean(), jnp.exp(right).mean(), -right.mean()


def evaluate(setting: Setting, graphdef: nnx.GraphDef, params: nnx.State, task: Task) -> dict[str, float]:
    found = {}
    train = jax.tree.map(lambda values: values[: setting.held_out], task.train)
    for name, examples in (("train", train), ("validation", task.validation), ("test", task.test)):
        accuracy, rate, nll = _scores(graphdef, params, examples)
        found |= {f"{name} accuracy": float(accuracy), f"{name} pass rate": float(rate), f"{name} NLL": float(nll)}
    return found


class Trainer:
    """Trains one method, compiled once for all seeds and learning rates."""

    def __init__(self, setting: Setting, method: Method):
        self.setting, self.method = setting, method
        self.graphdef, _ = make_model(setting, 0)
        self.chunk = make_chunk(setting, method, self.graphdef)

    def run(self, task: Task, seed: int, learning_rate: float) -> tuple[dict[str, Any], dict[int, nnx.State]]:
        """The curves of one run and, for its snapshot steps, the weights. Prints how it ended."""
        began, each = time.perf_counter(), self.setting.steps // self.setting.evaluations
        _, params = make_model(self.setting, seed)
        moments = optax.scale_by_adam().init(params)
        rows, kept = [], {}
        for step in range(0, self.setting.steps + 1, each):
            rows.append({"step": step} | evaluate(self.setting, self.graphdef, params, task))
            if step in self.setting.snapshots:
                kept[step] = params
            if step < self.setting.steps:
                params, moments = self.chunk(params, moments, task.train, seed, learning_rate, step)
        last = "  ".join(f"{name} {text.format(rows[-1][name])}" for name, text in MEASURED.items())
        seconds = time.perf_counter() - began
        print(f"{self.method.label:18} seed {seed:<3} lr {learning_rate:<6g} {last}  {seconds:.0f} s", flush=True)
        run = {"method": self.method.name, "N": self.method.size, "seed": seed, "learning_rate": learning_rate}
        return run | {"curves": {key: [row[key] for row in rows] for key in rows[0]}}, kept


def tune(setting: Setting, trainer: Trainer, task: Task) -> tuple[float, list[dict[str, Any]]]:
    """The learning rate of the best validation accuracy at the end, and what each of the grid came to."""
    found = []
    for learning_rate in setting.learning_rates:
        run, _ = trainer.run(task, setting.tuning_seed, learning_rate)
        accuracy = run["curves"]["validation accuracy"][-1]
        found.append({key: run[key] for key in ("method", "N", "learning_rate")} | {"validation accuracy": accuracy})
    return max(found, key=lambda each: each["validation accuracy"])["learning_rate"], found


@functools.partial(jax.jit, static_argnums=0)
def expected_gradient(
    graphdef: nnx.GraphDef, params: nnx.State, batch: Examples, weights: Float[Array, "B"]
) -> nnx.State:
    """`-mean_x w(x) grad p(x)`: what the sampled gradient of an estimator with these weights is on average."""

    def weighted(params: nnx.State) -> Array:
        logprobs = jax.nn.log_softmax(nnx.merge(graphdef, params)(batch.inputs))
        return -(weights * jnp.exp(jnp.take_along_axis(logprobs, batch.labels[:, None], axis=1)[:, 0])).mean()

    return jax.grad(weighted)(params)


def cosine(one: nnx.State, other: nnx.State) -> float:
    """Of the angle between two gradients; 0 when one is zero, as that of groups without a success is."""
    norms = float(optax.tree.norm(one) * optax.tree.norm(other))
    return float(optax.tree.vdot(one, other)) / norms if norms > 0 else 0.0


def compare_gradients(setting: Setting, params: nnx.State, train: Examples, step: int) -> list[dict[str, Any]]:
    """The cosine with the gradient of cross-entropy: of each estimator's expected gradient, by its population weight,
    and of its sampled gradient (mean of `draws`), all of the first `compared` training inputs."""
    graphdef, _ = make_model(setting, 0)
    batch = jax.tree.map(lambda values: values[: setting.compared], train)
    keys = jax.random.split(jax.random.key(step), setting.draws)
    exact = step_gradient(Method(EXACT), graphdef, params, batch, keys[0])
    logprobs = jax.nn.log_softmax(nnx.merge(graphdef, params)(batch.inputs))
    rates = np.exp(np.asarray(logprobs, np.float64))[np.arange(setting.compared), np.asarray(batch.labels)]
    found = []
    for method in methods(setting)[1:]:
        weights = weights_of([method.estimator], method.size, rates)[0]
        expected = expected_gradient(graphdef, params, batch, jnp.asarray(weights, jnp.float32))
        sampled = [cosine(step_gradient(method, graphdef, params, batch, key), exact) for key in keys]
        row = {"step": step, "mean pass rate": float(rates.mean()), "method": method.name, "N": method.size}
        found.append(row | {"expected": cosine(expected, exact), "sampled": float(np.mean(sampled))})
    return found


def study(setting: Setting) -> dict[str, Any]:
    """Every method, tuned and then trained on each seed; and the gradients along the first cross-entropy run."""
    tasks = {seed: make_task(setting, seed) for seed in (setting.tuning_seed, *setting.seeds)}
    tuning, runs, gradients = [], [], []
    for method in methods(setting):
        trainer = Trainer(setting, method)
        learning_rate, tried = tune(setting, trainer, tasks[setting.tuning_seed])
        tuning += tried
        for seed in setting.seeds:
            run, kept = trainer.run(tasks[seed], seed, learning_rate)
            runs.append(run)
            if method.name == EXACT and seed == setting.seeds[0]:
                for step, params in kept.items():
                    gradients += compare_gradients(setting, params, tasks[seed].train, step)
    found = {"tuning": tuning, "runs": runs, "gradients": gradients}
    return {"setting": dataclasses.asdict(setting), "jax": jax.__version__} | found


def rounded(value: Any) -> Any:
    """Numbers to five digits, all else as it is: a file that a reader can open."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def main(argv: Sequence[str] | None = None, setting: Setting = Setting()) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for classification.json and the figure")
    out = parser.parse_args(argv).out
    out.mkdir(parents=True, exist_ok=True)
    results = rounded(study(setting))
    (out / "classification.json").write_text(json.dumps(results) + "\n")
    draw(results, out / "maxrl_classification.png")
    print("", *(table(results) for table in (results_table, tuning_table, gradients_table)), sep="\n\n")
    print(f"\n{out}: classification.json and maxrl_classification.png")


if __name__ == "__main__":
    main()
