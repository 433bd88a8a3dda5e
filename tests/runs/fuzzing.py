"""Random configurations, each of which must be accepted, or rejected with a one-line message that names a key that is
set.

The keys are read from the dataclasses of `config/schema.py`, so a new key is covered automatically.
`tests/runs/test_fuzz.py` draws some configurations, `tests/stress/fuzz.py` thousands.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import math
import re
import resource
import signal
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from hypothesis import strategies as st

import tunix_like
from tests.tiny_model import HF
from tunix_like.cli import main as cli
from tunix_like.config.schema import Config, DataConfig
from tunix_like.config.sources import ESTIMATOR_KEYS
from tunix_like.data import SOURCES, reverse_text
from tunix_like.models.families import FAMILIES
from tunix_like.models.fields import HF_NAMES, ROPE_FIELDS
from tunix_like.training.learners import LEARNERS

MOST_SECONDS, MOST_BYTES = 15, 4 * 1024**3
"""The limits of time and memory of a configuration. Exceeding them is an error, like a traceback. A valid one of these
bases takes 0.1 s."""

STATM = Path("/proc/self/statm")
Place = tuple[str | int, ...]

_PLAIN: dict[str, Any] = {
    "model": {"init": "random", "config": {name: value for name, value in HF.items() if name != "vocab_size"}},
    "data": {"name": "reverse_text", "batch_size": 8, "train_size": 16, "eval_size": 8},
    "algorithm": {"advantage_estimator": "maxrl", "num_generations": 4},
    "rollout": {"max_prompt_length": 16, "max_tokens_to_generate": 8},
    "sft": {"max_steps": 4, "batch_size": 8},
    "eval": {"samples": 4, "batch_size": 8},
    "training": {"max_steps": 4, "mini_batch_size": 8},
}
BASES: dict[str, dict[str, Any]] = {
    "maxrl": {},
    "grpo": {
        "lora": {"rank": 2, "alpha": 4.0, "targets": ["q_proj", "up_proj"]},
        "model": {"quantize": "int8"},
        "algorithm": {
            "advantage_estimator": "grpo", "beta": 0.1, "overlong": "penalty", "overlong_buffer": 4,
            "sampler_is": "token", "sampler_is_min": 0.5, "sampler_is_kl": True, "dynamic_sampling": True,
        },
    },
    "maxpo": {"algorithm": {"advantage_estimator": "maxpo", "k": 2, "policy_loss_fn": "dppo"}},
    "maxk_mix": {
        "algorithm": {"advantage_estimator": "maxk_mix", "alpha": {"start": 0, "end": 1.5, "steps": 9}},
    },
    "order_statistic": {"algorithm": {"advantage_estimator": "order_statistic", "k": 2, "weights": [0.5, -1.0]}},
    "maze": {
        "data": {
            "name": "maze", "maze_size": 5, "train_size": 2, "eval_size": 1,
            "curriculum": True, "curriculum_correct": False, "curriculum_floor": 0.5, "curriculum_discount": 0.5,
        },
        "rollout": {"max_prompt_length": 48},
    },
    "mix": {
        "data": {
            "name": "mix", "train_size": None, "eval_size": None,
            "sources": [
                {"name": "reverse_text", "train_size": 8, "eval_size": 4, "label": "a", "weight": 1},
                {"name": "reverse_text", "train_size": 8, "eval_size": 4, "advantage_estimator": "maxpo", "k": 2,
                 "weight": 2},
            ],
        },
    },
    "jsonl": {
        "model": {"init": "pretrained", "path": "model", "config": None},
        "data": {
            "name": "jsonl", "path": "rows.jsonl", "train_size": None, "prompt_template": "{question}",
            "system_prompt": "ab", "chat_template_args": {"thinking": False},
        },
        "rewards": {"functions": [{"name": "exact_match", "weight": 1.0}]},
    },
}  # fmt: skip
"""Complete configurations that together set the keys on which other keys depend."""


def _rules(cls: type = Config, above: Place = ()) -> Iterator[tuple[Place, Mapping[str, Any]]]:
    """Returns the path of every key of the configuration and the declared rule of its values."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from _rules(typing.cast(type, hints[field.name]), (*above, field.name))
        elif not field.metadata["python_only"]:
            yield (*above, field.name), field.metadata


_HF_FIELDS = sorted({*HF_NAMES.values(), *ROPE_FIELDS, "model_type", "layer_types", "sliding_window", "hidden_act"})
_ENTRY = [
    *(field.name for field in dataclasses.fields(DataConfig)),
    "label",
    "weight",
    "advantage_estimator",
    *ESTIMATOR_KEYS,
]


KEYS = [place for place, _ in _rules()]
INNER = [
    *(("model", "config", name) for name in _HF_FIELDS),
    *(("data", "sources", 1, name) for name in _ENTRY),
    *(("rewards", "functions", 0, name) for name in ("name", "weight")),
    *(("algorithm", "alpha", name) for name in ("start", "end", "steps")),
]

_CHOICES = sorted({choice for _, rule in _rules() for choice in rule["choices"] or ()})
_TEXTS = [
    "",
    " ",
    "x",
    "-1",
    "1e9",
    "\x00",
    "ключ",
    "\ud7ff",
    "a/b",
    "{",
    "{0}",
    "{question!z}",
    "%s",
    "~",
    "..",
    "é" * 5000,
]
_TEXTS += ["nowhere.py:f", "no.such.module", ":", ".py:", "/dev/null", "rows.jsonl", "model", "[", "a: b", "\n", "Ⅷ"]
_NAMES = [
    *LEARNERS,
    "ppo_clip",
    "gspo",
    "dppo",
    "vespo",
    *FAMILIES,
    *SOURCES,
    "mix",
    *_CHOICES,
    "exact_match",
    "q_proj",
    "fsdp",
]
_scalars = st.none() | st.booleans() | st.integers(-3, 9) | st.floats() | st.sampled_from([*_TEXTS, *_NAMES])
_inner_names = st.sampled_from(["a", "name", "weight", "", "é", "rope_type", "full_attention", 1]) | st.text(max_size=3)
KINDS: dict[str, st.SearchStrategy[Any]] = {
    "null": st.none(),
    "boolean": st.booleans(),
    "huge": st.sampled_from([2**31 - 1, 2**31, 2**32, 2**63, 10**12, 10**30, 10**400, 1e30, 1e300]),
    "negative": st.integers(-9, -1) | st.sampled_from([-0.5, -1e-9, -1e300, -(2**63), -(10**30)]),
    "small": st.integers(0, 9) | st.sampled_from([0.0, 0.5, 1.0, 5e-324]),
    "no number": st.sampled_from([math.nan, math.inf, -math.inf]),
    "text": st.sampled_from(_TEXTS) | st.text(max_size=8),
    "name": st.sampled_from(_NAMES),
    "list": st.lists(_scalars | st.sampled_from([[], {}, 10**12, -(10**30)]), max_size=3),
    "mapping": st.recursive(
        st.dictionaries(_inner_names, _scalars, max_size=3),
        lambda inner: st.dictionaries(_inner_names, _scalars | inner | st.lists(inner, max_size=2), max_size=2),
        max_leaves=3,
    ),
}
"""The values that a key is set to, by kind."""


class Case(NamedTuple):
    """A base configuration, the values that are set in it, their kinds, and where they are set: in the file or on the
    command line."""

    base: str
    changes: dict[Place, Any]
    kinds: tuple[str, ...]
    typed: bool


@st.composite
def cases(draw: Any) -> Case:
    """Draws one to three keys of a base, most often one, and sets them to arbitrary values."""
    base = draw(st.sampled_from(list(BASES)))
    tree = config_of(base)
    places = KEYS + [place for place in INNER if _holder(tree, place) is not None]
    chosen = draw(
        st.lists(st.sampled_from(places), min_size=1, max_size=draw(st.sampled_from([1, 1, 2, 3])), unique=True)
    )
    chosen = [place for place in chosen if not any(place[: len(other)] == other != place for other in chosen)]
    kinds = tuple(draw(st.sampled_from(list(KINDS))) for _ in chosen)
    changes = {place: draw(KINDS[kind]) for place, kind in zip(chosen, kinds, strict=True)}
    return Case(base, changes, kinds, draw(st.booleans()))


def config_of(base: str) -> dict[str, Any]:
    tree = copy.deepcopy(_PLAIN)
    for section, values in BASES[base].items():
        tree.setdefault(section, {}).update(copy.deepcopy(values))
    return tree


def _holder(tree: Any, place: Place) -> Any:
    """Returns the container of the value at `place`, or None. Creates missing sections."""
    for i, part in enumerate(place[:-1]):
        if isinstance(part, str) and i < 1:
            tree = tree.setdefault(part, {})
        elif isinstance(tree, Mapping):
            tree = tree.setdefault(part, {}) if place[:2] == ("sft", "optimizer") else tree.get(part)
        else:
            tree = tree[part] if isinstance(tree, list) and len(tree) > typing.cast(int, part) else None
        if tree is None:
            return None
    return tree


def spelt(place: Place) -> str:
    """Returns a path in the notation `data.sources[1].k`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).lstrip(".")


class Violation(AssertionError):
    """Raised for a configuration or a file that ended in anything except a one-line message of this package."""


class _Dumper(yaml.SafeDumper):
    """Writes a repeated value twice, because an alias would be rejected as an alias."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


class TooLate(BaseException):
    """Raised when the alarm fires. It is not an `Exception`, which the code under test could convert into a message."""


@contextlib.contextmanager
def limits() -> Iterator[None]:
    """Limits the block to `MOST_SECONDS`, and to `MOST_BYTES` beyond the current memory. Raises an exception instead of
    a hang."""

    def late(*_: Any) -> None:
        raise TooLate(f"{MOST_SECONDS} s are over")

    before, soft = signal.signal(signal.SIGALRM, late), resource.getrlimit(resource.RLIMIT_AS)
    if STATM.exists():  # Linux
        held = int(STATM.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + MOST_BYTES, soft[1]))
    signal.alarm(MOST_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, soft)


def make_place(folder: Path) -> None:
    """Writes the files that the bases name."""
    model, _ = tunix_like.load_model(HF, init="random")
    tokenizer = reverse_text.tokenizer()
    tunix_like.export_model(model, tokenizer, folder / "model")
    (folder / "model" / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}>")
    rows = "".join(f'{{"question": "{a}{b}", "answer": "{b}{a}"}}\n' for a in "abcd" for b in "efgh")
    (folder / "rows.jsonl").write_text(rows)


def run(case: Case, folder: Path) -> str | None:
    """Runs `tunix-like train CONFIG --dry-run` in `folder`, the working directory, with the files of `make_place`.

    Returns:
      the message, or None if the configuration is accepted.

    Raises:
      Violation: any other result, or a message that names none of the keys that are set.
    """
    tree, words = config_of(case.base), []
    for place, value in case.changes.items():
        if case.typed and all(isinstance(part, str) for part in place):
            words.append(f"{spelt(place)}={value if isinstance(value, str) else _flow(value)}")
        else:
            holder = _holder(tree, place)
            holder[place[-1]] = value
    file = folder / "fuzz.yaml"
    file.write_text(yaml.dump(tree, Dumper=_Dumper, allow_unicode=True), encoding="utf-8", errors="surrogatepass")
    out, error = io.StringIO(), io.StringIO()
    try:
        with limits(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            status = cli.main(["train", str(file), *words, "--dry-run"])
    except (Exception, SystemExit, TooLate) as caught:
        raise Violation(f"{case}: {type(caught).__name__}: {str(caught)[:300]}") from caught
    if status == 0:
        return None
    said = error.getvalue()
    if status != 2 or not said.startswith("error: "):
        raise Violation(f"{case}: status {status}, {said}")
    if not any(_named(place, value, said) for place, value in case.changes.items()):
        raise Violation(f"{case}: the message names none of the keys: {said[:400]}")
    return said


_FELT_ELSEWHERE = {
    "advantage_estimator": ("{section}.k", "{section}.ddof"),
    "eval_size": ("data.sources[0]", "data.sources[1]"),
    "maze_size": ("rollout.max_prompt_length",),
    "prompt_template": ("rollout.max_prompt_length",),
    "system_prompt": ("rollout.max_prompt_length",),
    **dict.fromkeys(["hidden_size", "intermediate_size", "num_key_value_heads", "head_dim"], ("mesh.shape",)),
}
"""Keys whose valid values may make another key invalid. The message then names the other key."""


def _named(place: Place, value: Any, said: str) -> bool:
    """Returns whether a message names its key.

    The name is the key itself; for a mapping or a list its path and the key in it; for a file or a function its name;
    for the name of an estimator also the keys that it does not read.
    """

    def has(name: str) -> bool:
        return re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", said) is not None

    cut = 2 if place[:2] == ("model", "config") else 3
    inner = rf"(?<!\w){re.escape(str(place[-1]))}(?!\w)"
    above = cut == 2 or has(spelt(place[:cut]))  # a Hugging Face field is identified by its name only
    if has(spelt(place)) or (len(place) > cut and above and re.search(inner, said)):
        return True
    if place[-1] in ("path", "name", "functions") and isinstance(value, str) and len(value) > 2:
        return value.lower() in said.lower()
    section = spelt(place[:-1])
    return any(has(name.format(section=section)) for name in _FELT_ELSEWHERE.get(str(place[-1]), ()))


def _flow(value: Any) -> str:
    """Returns a value in the notation of the command line."""
    return (
        yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=10**9, allow_unicode=True)
        .removesuffix("...\n")
        .strip()
    )
