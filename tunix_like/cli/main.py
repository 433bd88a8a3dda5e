"""The command line: load the config, build the parts, hand them to the learner its `advantage_estimator` names.

Exit status: 0 done, 1 `doctor` or `check-rewards` found something wrong, 2 bad input (one line says what), 70 in a run
of several processes after an error of this one or the loss of another, 74 the last checkpoint, or the output of another
command, could not be written, 75 stopped by a signal after saving, 141 nobody reads the output (`output.py`). This
module knows no algorithm.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunix_like.cli import init as starting
from tunix_like.config.load import load
from tunix_like.errors import NotSaved, UserError
from tunix_like.runtime import console, output, progress
from tunix_like.runtime.visible import visible

if TYPE_CHECKING:
    from tunix_like.data.tokenizer import Tokenizer
    from tunix_like.rollout.samples import Samples
    from tunix_like.runs.build import Parts
    from tunix_like.training.learner import Learner
    from tunix_like.types import Engine, SamplingParams

AddCommand = Callable[[str, Any, str, str], argparse.ArgumentParser]
"""`f(name, run, summary, example)` adds a command."""

OVERRIDES = "a.b=value ...: overrides of single keys; see tunix_like/config/base_config.yaml for all of them"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status."""
    output.guard()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s", handlers=[console.LogHandler()])
    logging.getLogger("tunix_like").setLevel(logging.INFO)
    arguments = _parse(argv)
    joined = False
    try:
        joined = _join(arguments)
        output.go_on(joined or _trains(arguments))
        with progress.shown(lines=arguments.run is not _generate):  # whose output is the completion and nothing else
            status = int(arguments.run(arguments) or 0)
        output.finish()
        return status
    except UserError as error:
        print(visible(f"error: {error}"), file=sys.stderr)
        if joined:
            from tunix_like.runtime import processes

            processes.leave_refused(error.status)
        return error.status
    except (SystemExit, KeyboardInterrupt) as stop:
        if message := getattr(stop, "message", ""):
            print(f"{message}; the same command resumes", file=sys.stderr)
            return 75
        raise
    except Exception as error:
        if joined:
            from tunix_like.runtime import processes

            processes.leave(error)
        raise


def _trains(arguments: argparse.Namespace) -> bool:
    """Whether the command makes a run, which must outlive its output."""
    return arguments.run in (_train, _sft) and not getattr(arguments, "dry_run", False)


def _join(arguments: argparse.Namespace) -> bool:
    """Joins the other processes of the run, where the command line or the environment says that there are some.

    Raises:
      UserError: only some of the three options are given, or the processes do not find each other.
    """
    if not hasattr(arguments, "coordinator"):
        return False
    place = arguments.coordinator, arguments.num_processes, arguments.process_id
    if any(each is None for each in place) and any(each is not None for each in place):
        raise UserError("--coordinator, --num-processes and --process-id go together; --distributed asks the cluster.")
    if place[0] is None and not arguments.distributed and not _started_by_scheduler():
        return False
    from tunix_like.runtime import processes

    if place[0] is not None and not re.fullmatch(r".+:\d+", place[0]):
        raise UserError(f"--coordinator {place[0]}: give host and port of process 0, as in localhost:12345.")
    processes.start(*place)
    if not processes.is_first():
        console.silence()
    return True


def _started_by_scheduler() -> bool:
    """Whether this is one of several processes, by the variables that SLURM (`srun`) and GKE set for each of them."""
    if "SLURM_STEP_NODELIST" in os.environ:
        return int(os.environ.get("SLURM_NTASKS", "1")) > 1
    return "," in (os.environ.get("TPU_WORKER_HOSTNAMES") or os.environ.get("TPU_PROCESS_ADDRESSES") or "")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments, overrides before or after options: argparse by itself leaves over those that stand after one."""
    parser = _parser()
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["advantages"]:  # a reward below zero may come first: a blank tells argparse that it is no option
        words = [f" {word}" if word[:1] == "-" and word[1:2] in "0123456789." else word for word in words]
    arguments, left = parser.parse_known_args(words)
    if not all("=" in word and not word.startswith("-") for word in left) or (left and "overrides" not in arguments):
        parser.error(f"unrecognized arguments: {' '.join(left)}")
    if left:
        arguments.overrides += left
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tunix-like", description="RL post-training of language models in JAX/Flax.",
        epilog="example: tunix-like train examples/maze.yaml algorithm.advantage_estimator=rloo training.seed=1\n\n"
        "exit status: 0 done, 1 doctor or check-rewards found something wrong, 2 bad input, 70 an error in one of\n"
        "several processes, 74 the last checkpoint, or the output of another command, could not be written,\n"
        "75 stopped by a signal after saving (the same command resumes), 141 nobody reads the output (of no run)",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Any, summary: str, example: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=summary, description=summary, epilog=f"example: tunix-like {example}")
        sub.set_defaults(run=run)
        return sub

    _add_training(command)
    _add_trained(command)
    _add_looking(command)
    _add_checking(command)
    return parser


def _add_training(command: AddCommand) -> None:
    """The commands that begin and make a run."""
    init = command("init", _init, "write a commented YAML and a reward file to start from", "init mine --like gsm8k")
    init.add_argument("name", help="what the files and the run are called")
    init.add_argument("--like", choices=starting.KINDS, default="own", help="own: a JSONL file of yours (the default)")
    train = command("train", _train, "train from a YAML; the same command resumes", "train examples/maze.yaml")
    train.add_argument("--dry-run", action="store_true", help="check everything but the weights, show what would run")
    sft = command("sft", _sft, "supervised fine-tuning only", "sft examples/maze.yaml sft.max_steps=100")
    for sub in (train, sft):
        sub.add_argument("config", help="a YAML file")
        sub.add_argument("overrides", nargs="*", help=OVERRIDES)
        _add_processes(sub)


def _add_trained(command: AddCommand) -> None:
    """The commands that use what was trained."""
    source = "run folder, RUN/checkpoints/STEP, RUN/checkpoints/best, model folder or hub id"
    evaluate = command(
        "eval",
        _eval,
        "pass@k, avg@n and maj@k of a run or a model, with intervals",
        "eval runs/maze-maxrl-s0 eval.samples=64",
    )
    evaluate.add_argument(
        "--out", metavar="FILE.jsonl", help="write every problem with its completions; the summary goes beside it"
    )
    evaluate.add_argument(
        "--preset",
        choices=("greedy", "sampled"),
        help="greedy: the most likely completion alone; sampled: 16 at temperature 1; unset: the run's `eval` section",
    )
    evaluate.add_argument(
        "--compare",
        nargs=2,
        metavar=("A", "B"),
        help="instead of one source two, or two files of --out: what B does better, problem by problem",
    )
    evaluate.add_argument("source", nargs="?", help=source)
    generate = command("generate", _generate, "complete one prompt", 'generate runs/x --prompt "2 + 2 =" --greedy')
    generate.add_argument(
        "--prompt",
        required=True,
        help="text; a chat message where the run has a system prompt or data.apply_chat_template; no prompt_template",
    )
    generate.add_argument(
        "--greedy",
        action="store_true",
        help="the most likely token at every place, as eval --preset greedy, instead of one drawn at the run's "
        "rollout.temperature; the same as rollout.temperature=0",
    )
    generate.add_argument("source", help=source)
    export = command("export", _export, "write a Hugging Face folder", "export runs/maze-maxrl-s0 exported")
    export.add_argument("source", help=source)
    export.add_argument("out", help="folder to write")
    export.add_argument("--adapter", action="store_true", help="the LoRA adapters alone, in PEFT's format")
    export.add_argument("--overwrite", action="store_true", help="replace OUT, all of it, if it is an earlier export")
    for sub in (evaluate, generate, export):
        sub.add_argument(
            "--best", action="store_true", help="of a run the best checkpoint by training.best_metric, not the newest"
        )
        sub.add_argument("overrides", nargs="*", help=OVERRIDES)
    _add_processes(evaluate)


def _add_looking(command: AddCommand) -> None:
    """The commands that show what a run did, or an estimator would do."""
    report = command(
        "report",
        _report,
        "one HTML file of one or several runs: curves, pass rates, time, rollouts",
        "report runs/maze-maxrl-s0 runs/maze-grpo-s0 --out both.html",
    )
    report.add_argument("runs", nargs="+", metavar="RUN", help="run folder; several are laid over each other")
    report.add_argument("--out", metavar="FILE", help="where to write it (default: report.html in the first RUN)")
    report.add_argument(
        "--gradients",
        type=int,
        metavar="N",
        help="measure the gradient norms of the prompts of N batches, by pass rate, under each newest checkpoint",
    )
    report.add_argument("--png", metavar="FOLDER", help="write the figures too, as PNG files for papers")
    replay = command(
        "replay",
        _replay,
        "look again at an update that was skipped because it was no number",
        "replay runs/maze-maxrl-s0/skipped/step_000012_update_0.npz",
    )
    replay.add_argument("file", help="RUN/skipped/step_N_update_M.npz")
    replay.add_argument("overrides", nargs="*", help=OVERRIDES)
    advantages = command(
        "advantages",
        _advantages,
        "what every estimator makes of a group's rewards",
        "advantages 1,0,0,0 k=2 --plot w.png",
    )
    advantages.add_argument("rewards", help="1,0,0,0; more groups of the same size after ';'; none: not scored")
    advantages.add_argument(
        "overrides", nargs="*", help="k=2 truncation_order=3 ddof=0 lengths=3,1,2,5 estimator=FILE.py:f"
    )
    advantages.add_argument("--plot", metavar="FILE.png", help="draw the population weights w(p) at this group size")


def _add_checking(command: AddCommand) -> None:
    """The commands that look at a config or a machine before anything is trained."""
    rewards = command(
        "check-rewards",
        _check_rewards,
        "what the reward functions give to gold answers and to wrong ones; no model is needed",
        "check-rewards examples/maze.yaml",
    )
    rewards.add_argument("config", help="a YAML file")
    doctor = command(
        "doctor",
        _doctor,
        "versions, devices, memory, extras, and what to do about them; with --config, what a run's programs hold on "
        "devices that are not here",
        "doctor --config examples/gsm8k/qwen3_1.7b.yaml --devices v5e-8",
    )
    doctor.add_argument("--config", help="a YAML file whose programs are compiled from shapes alone")
    doctor.add_argument("--devices", help="KIND-N, NxKIND or N: v5e-8, 8xh100, 8")
    for sub in (rewards, doctor):
        sub.add_argument("overrides", nargs="*", help=OVERRIDES)


def _add_processes(parser: argparse.ArgumentParser) -> None:
    """The options that `_join` reads."""
    several = parser.add_argument_group(
        "several processes", "start the same command in each; under SLURM and on a GKE TPU slice nothing is needed"
    )
    several.add_argument("--distributed", action="store_true", help="ask the cluster (Cloud TPU, Open MPI) for them")
    several.add_argument("--coordinator", metavar="HOST:PORT", help="address of process 0, the same for all")
    several.add_argument("--num-processes", type=int, metavar="N", help="how many there are")
    several.add_argument("--process-id", type=int, metavar="I", help="number of this one, from 0")


def _setup_jax() -> None:
    """Compiled programs are kept between runs; JAX_COMPILATION_CACHE_DIR chooses where."""
    import jax

    folder = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(Path.home() / ".cache" / "tunix_like" / "xla"))
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # the many small ones add up to seconds


def _train(arguments: argparse.Namespace) -> None:
    config = load(arguments.config, arguments.overrides)
    _setup_jax()
    from tunix_like.data import shared
    from tunix_like.runs import build as runs
    from tunix_like.storage import run_lock

    parts = runs.assemble(config, abstract=arguments.dry_run)
    folder = runs.run_folder(config, arguments.config, str(parts.config.algorithm.advantage_estimator))
    _announce(parts, folder)
    if arguments.dry_run or parts.config.sft.max_steps:  # otherwise the learner warns of them, before its first step
        shared.warn_shared(parts.source.train, parts.source.eval)
    if arguments.dry_run:
        checked = "" if runs.check_memory(parts) else ", but for memory, of which the device says nothing"
        print(
            f"dry run: everything above was checked{checked}, the model by its description alone; nothing was trained."
        )
        return
    with run_lock.owned(folder):
        _begin(folder, parts)
        unsaved = _fine_tune(parts, folder, another_follows=True) if parts.config.sft.max_steps else None
        learner, data = _learner(parts, folder), parts.config.data
        try:
            learner.train(
                parts.source.train,
                parts.source.eval,
                batch_size=data.batch_size,
                shuffle=data.shuffle,
                overlong_prompts=data.overlong_prompts,
            )
        except NotSaved as error:
            unsaved = error
        _closing_table(folder, parts)
    _picture(parts, learner)
    if unsaved is not None:
        raise unsaved


def _begin(folder: Path, parts: Parts) -> None:
    """Writes the config of the run into its folder, which from here on takes the output that has no other place."""
    from tunix_like.runs import build as runs
    from tunix_like.runtime import processes

    runs.claim(folder, parts)
    if processes.is_first():  # the only one to write there
        output.keep_in(folder)


def _learner(parts: Parts, folder: Path) -> Learner:
    config = parts.config
    training = dataclasses.replace(config.training, output_dir=str(folder), actor_optimizer=config.optimizer)
    held: list[tuple[int, Samples]] = []  # until the line of their step is said

    def on_row(row: dict[str, Any], total: int | None) -> None:
        console.say(console.step_line("train", row["step"], total, row))
        while held:
            _show_samples(*held.pop())

    return parts.learner(
        model=parts.model,
        tokenizer=parts.tokenizer,
        reward_fns={name: function for name, function, _ in parts.rewards},
        reward_weights=[weight for _, _, weight in parts.rewards],
        algo_config=config.algorithm,
        rollout_config=config.rollout,
        training_config=training,
        eval_config=config.eval,
        mesh=parts.mesh,
        success_threshold=config.rewards.success_threshold,
        source_estimators=parts.source_estimators,
        on_row=on_row,
        on_samples=lambda step, samples: held.append((step, samples)),
    )


def _show_samples(step: int, samples: Samples) -> None:
    """A prompt's best and worst completion."""
    chosen = {"best": samples.best, "worst": samples.worst}
    if samples.scored == 0 or samples.best.reward == samples.worst.reward:
        names = {0: "none scored", 1: "one scored", samples.size: f"all {samples.size} alike"}
        chosen = {names.get(samples.scored, f"{samples.scored} scored, alike"): samples.best}
    rows = [
        (name, f"{each.reward:g}" if samples.scored else "-", f"{each.advantage:.3g}",
         f"{each.length}{'' if each.finished else ' (cut)'}", console.excerpt(each.text, 600))
        for name, each in chosen.items()
    ]  # fmt: skip
    prompt = console.excerpt(samples.prompt, 300).replace("\n", "\\n")
    known = "" if samples.scored == samples.size else f", {samples.scored} of {samples.size} completions scored"
    columns = ["", "reward", "advantage", "tokens", "completion"]
    console.table(f'step {step}, prompt "{prompt}"{known}', columns, rows, texts=columns[-1:])


def _fine_tune(parts: Parts, folder: Path, another_follows: bool) -> NotSaved | None:
    """Supervised fine-tuning into the run's folder, on the run's model, in place. Returns what kept its last checkpoint
    from being written, which is no reason to stop; a signal is one."""
    from tunix_like.runtime import processes
    from tunix_like.training.sft import SFTTrainer

    config = parts.config
    evaluate = None
    if len(parts.source.eval):
        quick = dataclasses.replace(config.eval, samples=1, k=[1], batch_size=4 * config.eval.batch_size)
        evaluator = parts.evaluator(quick)
        kept = folder / "rollouts" / "eval" if processes.is_first() else None
        evaluate = lambda params, step: evaluator(params, rollouts=kept, step=step).metrics  # noqa: E731
    trainer = SFTTrainer(
        model=parts.model,
        tokenizer=parts.tokenizer,
        sft_config=config.sft,
        rollout_config=config.rollout,
        training_config=dataclasses.replace(config.training, output_dir=str(folder)),
        mesh=parts.mesh,
        evaluate=evaluate,
    )
    total = config.sft.max_steps

    def on_row(row: dict[str, Any]) -> None:
        step = row["sft/step"]
        if step % 25 == 0 or step == total or "sft/eval/pass@1" in row:
            console.say(console.step_line("sft", step, total, row))

    try:
        kinds = {"shuffle": config.data.shuffle, "another_follows": another_follows}
        trainer.train(parts.source.train, on_row=on_row, **kinds)
    except NotSaved as error:
        if error.stopped:
            raise
        return error
    return None


def _sft(arguments: argparse.Namespace) -> None:
    config = load(arguments.config, arguments.overrides)
    if not config.sft.max_steps:
        raise UserError("sft.max_steps: 0 trains nothing; set it, e.g. sft.max_steps=300.")
    _setup_jax()
    from tunix_like.data import shared
    from tunix_like.runs import build as runs
    from tunix_like.storage import run_lock

    parts = runs.assemble(config)
    folder = runs.run_folder(config, arguments.config, "sft")
    _announce(parts, folder)
    shared.warn_shared(parts.source.train, parts.source.eval)
    with run_lock.owned(folder):
        _begin(folder, parts)
        unsaved = _fine_tune(parts, folder, another_follows=False)
    if unsaved is not None:
        raise unsaved
    console.say(f"supervised fine-tuning is done: tunix-like eval {folder}, tunix-like export {folder} OUT")


def _announce(parts: Parts, folder: Path) -> None:
    """What is about to run, and one prompt as the model will see it."""
    from tunix_like.data.stream import check_prompts, render, usable
    from tunix_like.runs.build import describe

    for name, value in [*describe(parts), ("folder", str(folder))]:
        console.say(f"{name:>9}: {value}")
    config = parts.config
    for rows, what in ((parts.source.train, "training"), (parts.source.eval, "evaluation")):
        if len(rows):
            limit, policy = config.rollout.max_prompt_length, config.data.overlong_prompts
            with progress.task(f"reading the {what} prompts"):
                skipped = str(check_prompts(rows, parts.tokenizer, limit, policy, what))
            console.say(f"{what:>10}: {len(rows)} prompts{skipped and f', {skipped}'}")
    rendered = (render(row, parts.tokenizer, limit) for row in parts.source.train)
    first = next(prompt for prompt in rendered if usable(prompt, limit))
    console.say(f"{'prompt':>9}: {_both_ends(first.text, 600)}")
    console.say(f"{'ids':>9}: {_both_ends(first.tokens, 40)}")


def _both_ends(values: str | list[int], most: int) -> str:
    """All, or the two ends of what is longer: there stands what a chat template adds."""
    half = most // 2
    return repr(values) if len(values) <= most else f"{values[:half]!r} ... {values[-half:]!r}"


def _closing_table(folder: Path, parts: Parts) -> None:
    """The evaluations before and after RL, from the run's own metrics."""
    from tunix_like.runtime import processes
    from tunix_like.storage import metrics

    if not processes.is_first():  # whose file it is
        return
    found = [row for row in metrics.rows(folder) if "step" in row and any(k.startswith("eval/") for k in row)]
    if len(found) > 1:
        _before_and_after(found[0], found[-1], parts)
    elif not found:
        console.say("no evaluation: the data has no held-out rows")
    if (metric := parts.config.training.best_metric) is not None:
        _say_best(folder, metric)
    console.say(
        f"run folder: {folder} (tunix-like eval | generate | export | report {folder}). To go on, raise "
        "training.max_steps; to start anew, give another training.output_dir or delete the folder."
    )


def _say_best(folder: Path, metric: str) -> None:
    """Which checkpoint is kept as the best."""
    from tunix_like.storage.best import best_of
    from tunix_like.storage.checkpoints import Checkpoints

    best = best_of(folder, metric)
    with Checkpoints(folder / "checkpoints") as checkpoints:
        kept = best.among(checkpoints.steps())
    if kept is None:
        console.say(f"best: no checkpoint of a step with {metric} is there")
    else:
        console.say(f"best: {best.said(kept)}, kept in {folder}/checkpoints/{kept} (--best takes it)")


def _before_and_after(before: dict[str, Any], after: dict[str, Any], parts: Parts) -> None:
    limit, settings = len(parts.source.eval), parts.config.eval
    first, cells = console.evaluation_cells(before), console.evaluation_cells(after)
    rows = [(name, first.get(name, "-"), cell) for name, cell in cells.items()]
    skipped = int(after.get("eval/skipped_prompts", 0))  # a row of an earlier version has no count
    size = min(settings.max_problems or limit, limit - skipped)
    number = console.problems(size, skipped, "held-out problems")
    title = f"{parts.learner.__name__}, {number}, {console.samples_each(settings.samples)}, with 95% intervals"
    console.table(title, ["", f"step {before['step']}", f"step {after['step']}"], rows)


def _picture(parts: Parts, learner: Learner) -> None:
    """One held-out problem drawn with the model's most likely answer, where the data can be drawn."""
    if parts.source.draw is None or not len(parts.source.eval):
        return
    from tunix_like.types import SamplingParams

    row, greedy = parts.source.eval[0], SamplingParams(temperature=0)
    answer = _complete(learner.engine, learner.params, parts.tokenizer, row["prompt"], greedy, seed=0)
    console.say("the first held-out problem with the model's most likely answer:")
    console.say(parts.source.draw(row, answer))


def _complete(
    engine: Engine, params: Any, tokenizer: Tokenizer, prompt: Any, sampling: SamplingParams, seed: int
) -> str:
    import jax

    from tunix_like.data.stream import render
    from tunix_like.rollout.rollouts import completion_texts

    limit = engine.max_prompt_length
    tokens = render({"prompt": prompt}, tokenizer, limit).tokens
    if not tokens:
        raise UserError("the prompt has no tokens; give --prompt some text.")
    if len(tokens) > limit:
        size = f"over {2 * limit}" if len(tokens) > 2 * limit else len(tokens)
        raise UserError(f"the prompt has {size} tokens; raise rollout.max_prompt_length ({limit}).")
    out = engine.generate(params, [tokens], [0], 1, jax.random.key(seed), sampling)
    return completion_texts(out, tokenizer)[0]


def _eval(arguments: argparse.Namespace) -> None:
    _setup_jax()
    from tunix_like.cli import eval as eval_command

    source, overrides = arguments.source, arguments.overrides
    if arguments.compare is not None and source is not None and "=" in source:  # the first override, taken for it
        source, overrides = None, [source, *overrides]
    overrides = [*eval_command.PRESETS.get(arguments.preset, ()), *overrides]
    if arguments.compare is None:
        if source is None:
            raise UserError("eval: name a run or a model, or two of them: --compare A B.")
        return eval_command.evaluate(_chosen(source, arguments.best), overrides, arguments.out)
    if arguments.best:
        raise UserError("eval --compare A B: leave --best out, and write RUN/checkpoints/best for a run.")
    if source is not None or arguments.out is not None:
        extra = f"--out {arguments.out}" if source is None else source
        raise UserError(
            f"eval --compare A B: leave {extra} out; to keep what is measured, evaluate each with --out and compare "
            "the files."
        )
    a, b = arguments.compare
    return eval_command.compare(a, b, overrides)


def _chosen(source: str, best: bool) -> str:
    """What `open_trained` takes. Raises UserError where the best checkpoint is asked for of what is no run folder."""
    from tunix_like.runs.trained import BEST

    if not best:
        return source
    if not (Path(source) / "checkpoints").is_dir():
        raise UserError(f"--best: {source} is no folder of a run with checkpoints.")
    return str(Path(source) / "checkpoints" / BEST)


def _greedy(overrides: Sequence[str]) -> list[str]:
    """The overrides of a greedy completion.

    Raises:
      UserError: an override that asks for another way to sample.
    """
    names = [f"rollout.{name}" for name in ("temperature", "top_p", "top_k")]
    given = [word for word in overrides if word.partition("=")[0].strip() in names]
    greedy = ["rollout.temperature=0"]
    if given and load(None, given).rollout != load(None, greedy).rollout:
        raise UserError(f"generate: --greedy is rollout.temperature=0; leave {' and '.join(given)} out, or --greedy.")
    return [*overrides, *greedy]


def _generate(arguments: argparse.Namespace) -> None:
    overrides = _greedy(arguments.overrides) if arguments.greedy else arguments.overrides
    _setup_jax()
    from tunix_like.models.loading import check_fit
    from tunix_like.runs.trained import open_trained
    from tunix_like.training.engine import make_engine
    from tunix_like.types import SamplingParams

    trained = open_trained(_chosen(arguments.source, arguments.best), overrides)
    check_fit(trained.model_config, trained.tokenizer, trained.config.rollout)
    data, rollout = trained.config.data, trained.config.rollout
    prompt: Any = arguments.prompt
    if data.apply_chat_template or data.system_prompt is not None:
        system = [] if data.system_prompt is None else [{"role": "system", "content": data.system_prompt}]
        prompt = [*system, {"role": "user", "content": prompt}]
    sampler = make_engine(trained.graphdef, trained.tokenizer, rollout, trained.mesh)
    sampling = SamplingParams(rollout.temperature, rollout.top_p, rollout.top_k)
    seed = trained.config.training.seed
    print(_sampling_line(sampling, seed), file=sys.stderr)
    console.print_completion(_complete(sampler, trained.params, trained.tokenizer, prompt, sampling, seed))


def _sampling_line(sampling: SamplingParams, seed: int) -> str:
    """How a completion is sampled, since an evaluation or another program may do it otherwise."""
    if sampling.temperature == 0:
        return "greedy: the most likely token at every place"
    top_k = "" if sampling.top_k is None else f", top-k {sampling.top_k}"
    return (
        f"sampled at temperature {sampling.temperature:g}, top-p {sampling.top_p:g}{top_k}, seed {seed}; --greedy "
        "takes the most likely token at every place"
    )


def _export(arguments: argparse.Namespace) -> None:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # weights are copied alone: the host holds what one device may not
    from tunix_like.models.loading import export_model
    from tunix_like.models.lora import save_adapter
    from tunix_like.runs.trained import open_trained
    from tunix_like.storage.output_folder import check_folder

    check_folder(arguments.out, arguments.overwrite, arguments.source)  # before weights are read, which takes minutes
    overrides = [*arguments.overrides, "model.attention=auto"]  # the run's own may need the run's devices
    trained = open_trained(_chosen(arguments.source, arguments.best), overrides, whole=True)
    if arguments.adapter:
        save_adapter(trained.model, arguments.out, overwrite=arguments.overwrite)
        console.say(f"wrote the adapters of {trained.origin} to {arguments.out}: peft loads them")
        if trained.config.model.init == "random":
            console.say("their base was drawn at random and is written nowhere: beside any other they mean nothing")
        if trained.model.quantized is not None:
            console.say(
                f"they were trained beside a base in {trained.model.quantized}: beside the original weights they "
                "are off by the error of the quantisation; the merged export is not"
            )
        return
    ends = trained.config.rollout.eos_tokens
    tokenizer = trained.tokenizer if ends is None else trained.tokenizer.with_eos_ids(ends)
    export_model(trained.model, tokenizer, arguments.out, overwrite=arguments.overwrite)
    console.say(f"wrote {trained.origin} to {arguments.out}: transformers and tunix-like load it")


def _init(arguments: argparse.Namespace) -> None:
    files = starting.write_start(arguments.name, arguments.like, Path())
    console.say(f"wrote {', '.join(map(str, files))}; the head of {files[0]} says what to do next")


def _check_rewards(arguments: argparse.Namespace) -> int:
    config = load(arguments.config, arguments.overrides)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing is computed on a device
    from tunix_like.cli import check_rewards as reward_check

    return reward_check.print_report(config)


def _replay(arguments: argparse.Namespace) -> None:
    _setup_jax()
    from tunix_like.report import replay

    replay.print_report(Path(arguments.file), arguments.overrides)


def _advantages(arguments: argparse.Namespace) -> None:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # a few small arrays: an accelerator stays with the run that has it
    _setup_jax()
    from tunix_like.cli import advantages as advantages_table

    advantages_table.show(arguments.rewards, arguments.overrides, arguments.plot)


def _report(arguments: argparse.Namespace) -> None:
    if arguments.gradients is not None:
        _setup_jax()
    from tunix_like.report import command

    command.write(arguments.runs, arguments.out, arguments.png, arguments.gradients)


def _doctor(arguments: argparse.Namespace) -> int:
    if arguments.config is None and arguments.devices is None and not arguments.overrides:
        from tunix_like.cli.doctor import print_report

        return print_report()
    if arguments.config is None or arguments.devices is None:
        raise UserError(
            "doctor: name both or neither: --config FILE --devices v5e-8 (or 8xh100, or 8) [a.b=value ...]."
        )
    config = load(arguments.config, arguments.overrides)
    os.environ["JAX_PLATFORMS"] = "cpu"  # whatever the machine has, these devices are not there
    from tunix_like.cli import programs

    return programs.print_report(config, arguments.devices)
