"""Teachers, which score the tokens that the policy samples (section `teacher` of a config)."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import grain.python as grain
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Bool, Float

from tunix_like.algorithms.objective import Objective
from tunix_like.config.schema import SELF, RolloutConfig, TeacherConfig
from tunix_like.data.source import SOURCE_COLUMN
from tunix_like.data.stream import SCANNED_ROWS, render, usable
from tunix_like.errors import UserError, check_type
from tunix_like.models.config import DecoderConfig
from tunix_like.models.decoder import check_decoder
from tunix_like.models.lora import fingerprint
from tunix_like.models.sharding import check_divides
from tunix_like.planning.memory import TeacherWork
from tunix_like.rollout.shapes import length_bucket, pad_tokens
from tunix_like.step.forward import with_prompts
from tunix_like.step.train_step import TeacherSpec
from tunix_like.text.tokenizer import Tokenizer
from tunix_like.text.untrusted import Filled, fill
from tunix_like.training.trainer import Trainer
from tunix_like.types import GroupBatch, Problem

_PROMPT = "{prompt}"


@dataclasses.dataclass(eq=False, repr=False)
class Teacher:
    """The model that scores the policy's tokens, and its prompts.

    Attributes:
      graphdef, params: the model; `params` is None if it has the current weights of the policy.
      work: what the memory estimate needs; None if the model is not in memory.
      limit: maximum number of tokens of its prompts.
      plays: whether environments answer the policy, which can change its prompts.
    """

    settings: TeacherConfig
    graphdef: Any
    params: Any
    config: DecoderConfig
    tokenizer: Tokenizer
    work: TeacherWork | None
    limit: int
    plays: bool

    def identity(self, mesh: Any) -> dict[str, Any]:
        """Returns the settings that a run and its checkpoint must share, with a fingerprint of a teacher's weights."""
        settings = self.settings
        fields = {name: getattr(settings, name) for name in ("weights", "prompt", "divergence", "coef")}
        fields |= {"mixture": settings.mixture, "limit": self.limit, "self": settings.path == SELF}
        return fields | ({} if settings.path == SELF else {"model": fingerprint(self.config, self.params, mesh)["all"]})

    @property
    def spec(self) -> TeacherSpec | None:
        """The teacher of the compiled step; None if its divergence is not a term of the loss."""
        return None if self.settings.mixture is None else TeacherSpec(self.graphdef, self.settings.mixture)

    def prompt_tokens(self, source: Any, columns: Mapping[str, Any], where: str) -> list[int]:
        """Returns the tokens of the teacher's own prompt (`teacher.prompt`) of a row. Raises UserError, which names the
        row with `where`, if it cannot be built or is too long."""
        assert self.settings.prompt is not None
        prompt = taught_prompt(self.settings.prompt, source, columns, where)
        tokens = render({**columns, "prompt": prompt}, self.tokenizer).tokens
        if not 0 < len(tokens) <= self.limit:
            raise UserError(
                f"teacher.prompt: {where}: it has {len(tokens)} tokens; the limit is {self.limit}. Raise "
                "teacher.max_prompt_length, or shorten it."
            )
        return tokens

    def batch(self, batch: GroupBatch, problems: Sequence[Problem], taught: Bool[np.ndarray, "P"]) -> GroupBatch:
        """Returns the batch as the teacher sees it: with its prompts, and with token ids of its vocabulary. Only the
        problems `taught` have a prompt; the columns of others may lack what it needs."""
        if self.settings.prompt is None:
            return with_prompts(batch, batch.prompt_tokens, batch.prompt_lengths, self.config.vocab_size)
        own = list(itertools.compress(problems, taught))
        for each in own if self.plays else ():
            if render({**each.columns, "prompt": each.source}, self.tokenizer).tokens != list(each.tokens):
                raise UserError(
                    f"teacher.prompt: prompt {each.text!r:.80}: the environment has changed it (by a first "
                    "observation or environment.history), which a teacher's own prompt would lack. Leave "
                    "teacher.prompt unset."
                )
        made = (self.prompt_tokens(each.source, each.columns, f"prompt {each.text!r:.80}") for each in own)
        rows = [next(made) if one else [0] for one in taught]
        lengths = np.array([len(row) for row in rows], np.int32)
        width = length_bucket(int(lengths.max()), self.limit)
        return with_prompts(batch, pad_tokens(rows, width), lengths, self.config.vocab_size)

    def logprobs(
        self, trainer: Trainer, batch: GroupBatch, rows: Bool[np.ndarray, "P G"]
    ) -> Float[np.ndarray, "P G T"]:
        """Returns the teacher's log-probabilities of the tokens of the completions `rows`.

        Args:
          trainer: that of the policy.
          batch: the result of `self.batch`.
        """
        params = trainer.params if self.params is None else self.params
        return trainer.token_logprobs(self.graphdef, params, batch, rows)


class Teachers:
    """The teachers of a run. Their settings differ in `path` only.

    Attributes:
      default: that of rows whose data source has none of its own; None: these rows have no teacher.
      by_source: the teachers of data sources (column `data_source`). Several sources can have the same.
    """

    def __init__(self, settings: TeacherConfig, default: Teacher | None, by_source: Mapping[str, Teacher]):
        self.settings = settings
        self.default = default
        self.by_source = by_source

    @property
    def distinct(self) -> list[Teacher]:
        """Each teacher once."""
        first = [] if self.default is None else [self.default]
        return list(dict.fromkeys([*first, *self.by_source.values()]))

    @property
    def spec(self) -> TeacherSpec | None:
        """See `Teacher.spec`. If it is not None, `default` is the only teacher."""
        return None if self.default is None else self.default.spec

    def identity(self, mesh: Any) -> dict[str, Any]:
        """Returns what a run and its checkpoint must share (see `Teacher.identity`), by arguments of the learner."""
        shared = {} if self.default is None else {"teacher": self.default.identity(mesh)}
        by_source = {source: teacher.identity(mesh) for source, teacher in self.by_source.items()}
        return shared | ({"source_teachers": by_source} if by_source else {})

    def of(self, columns: Mapping[str, Any], objective: Objective, where: str) -> Teacher | None:
        """Returns the teacher of a row with these columns; None without one.

        Args:
          where: names the row in an error message.

        Raises:
          UserError: the row has no teacher and, by its estimator, no other signal.
        """
        source = columns.get(SOURCE_COLUMN)
        teacher = self.by_source.get(source, self.default) if isinstance(source, str) else self.default
        if teacher is None:
            objective.check_taught(source, f"data source {source!r}: {where}")
        return teacher

    def check_rows(self, rows: Any, limit: int, objective: Objective) -> None:
        """Checks the first rows: that those without another signal have a teacher, and the teacher's prompts, but not
        of rows whose own prompt is skipped because it is empty or has more than `limit` tokens. Raises UserError if a
        teacher is missing, or if its prompt cannot be built or is too long."""
        if not isinstance(rows, Sequence | grain.MapDataset):
            return
        if self.settings.prompt is None and self.default is not None:
            return
        for number in range(min(len(rows), SCANNED_ROWS)):
            if (row := rows[number]) is None:
                continue
            where = f"training row {number}"
            teacher = self.of(row, objective, where)
            if teacher is None or self.settings.prompt is None:
                continue
            prompt = render(row, teacher.tokenizer, limit)
            if usable(prompt, limit):
                teacher.prompt_tokens(prompt.source, prompt.columns, where)

    def of_batch(
        self, problems: Sequence[Problem], objective: Objective
    ) -> list[tuple[Teacher, Bool[np.ndarray, "P"]]]:
        """Returns the teachers of a batch, each with the mask of its problems. Raises UserError as `of` does."""
        found = [self.of(each.columns, objective, f"prompt {each.text!r:.80}") for each in problems]
        masks = ((teacher, np.array([each is teacher for each in found])) for teacher in self.distinct)
        return [(teacher, mask) for teacher, mask in masks if mask.any()]


def taught_prompt(template: str, source: Any, columns: Mapping[str, Any], where: str) -> Any:
    """Returns the prompt that a teacher sees: the filled template, or for a prompt of messages these messages with the
    filled template as the content of the last message of the user.

    Control tokens in columns are plain text, as in `data.prompt_template`. `{prompt}` keeps those of a text prompt.

    Args:
      source: the column `prompt` of the row: text or messages.
      where: names the row in an error message.
    """
    if isinstance(source, str):
        return _filled(template, source, columns, where)
    users = [i for i, message in enumerate(source) if message["role"] == "user"]
    if not users:
        raise UserError(f"teacher.prompt: {where} has no message of the user, whose content the template replaces.")
    last = users[-1]
    text = _filled(template, source[last]["content"], columns, where)
    return [*source[:last], {**source[last], "content": text}, *source[last + 1 :]]


def _filled(template: str, prompt: str, columns: Mapping[str, Any], where: str) -> Filled:
    known = {name: value for name, value in columns.items() if value is not None}
    try:
        pieces = [fill(piece, known) for piece in template.split(_PROMPT)]
    except Exception as error:  # an unknown column, or a format that the value does not support
        raise UserError(
            f"teacher.prompt {template!r}: {where}: {type(error).__name__}: {error}; the row has the columns "
            f"{', '.join(sorted(known)) or 'none'}, and {_PROMPT}."
        ) from error
    texts = [text for piece in pieces for text in (prompt, piece)][1:]
    starts = itertools.accumulate(map(len, texts), initial=0)
    out = Filled("".join(texts))
    out.values = [
        (begin + start, end + start)
        for text, start in zip(texts, starts, strict=False)
        for begin, end in getattr(text, "values", ())
    ]
    return out


def check_served(settings: TeacherConfig, rollout: RolloutConfig, key: str) -> None:
    """Raises UserError if a server is the teacher of a policy that is sampled at another temperature than 1.

    Args:
      key: names the teacher in the message, as `teacher.path` does.
    """
    if settings.served and rollout.temperature != 1:
        raise UserError(
            f"rollout.temperature: got {rollout.temperature:g}; a teacher on a server ({key}) gives "
            "probabilities at temperature 1. Set 1."
        )


def check_positions(settings: TeacherConfig, config: DecoderConfig, rollout: RolloutConfig, key: str) -> None:
    """Raises UserError if the prompts of a teacher and the completions do not fit into its context.

    Args:
      key: names the teacher in the message, as `teacher.path` does.
    """
    total = (settings.max_prompt_length or rollout.max_prompt_length) + rollout.max_tokens_to_generate
    if total > config.max_positions:
        section = "rollout" if settings.max_prompt_length is None else "teacher"
        raise UserError(
            f"{key}: {section}.max_prompt_length + rollout.max_tokens_to_generate is {total}, but the teacher has "
            f"{config.max_positions} positions (max_position_embeddings). Lower them."
        )


def check_scorer(key: str, config: DecoderConfig, tokenizer: Tokenizer) -> None:
    """Raises UserError if a model lacks log-probabilities of tokens of the policy's tokenizer. Padding may differ.

    Args:
      key: names the model in the message, as `teacher.path` or `ref_model` do.
    """
    if config.scalar_head:
        raise UserError(f"{key}: it is a reward model (a scalar head), which gives no log-probabilities of tokens.")
    if config.vocab_size < tokenizer.vocab_size:
        raise UserError(
            f"{key}: it has a vocabulary of {config.vocab_size} tokens (vocab_size), and the tokenizer of the policy "
            f"has {tokenizer.vocab_size}. It must have the tokenizer of the policy."
        )


def check_reference(model: Any, tokenizer: Tokenizer, mesh: Mesh | None) -> None:
    """Raises UserError if the argument `ref_model` of a learner cannot be its reference."""
    check_decoder("ref_model", model)
    check_scorer("ref_model", model.config, tokenizer)
    check_divides(mesh, model.config)


def resolve_teacher(model: Any, settings: TeacherConfig | None, of_sources: bool) -> TeacherConfig | None:
    """Returns the settings of the teachers (None: the defaults); None if there is no teacher. `path` is set if the
    `model` is given.

    Args:
      of_sources: whether data sources have teachers of their own.

    Raises:
      UserError: a setting has no effect, because there is no teacher, or data sources cannot have their own.
    """
    settings = TeacherConfig() if settings is None else settings
    check_type("teacher_config", settings, TeacherConfig, "give a tunix_like.TeacherConfig(...)")
    if of_sources and settings.mixture is not None:
        raise UserError(
            "teacher.divergence: jsd runs inside the update, which has one teacher for all rows; teachers of data "
            "sources (data.sources[].teacher) need reverse_kl."
        )
    if model is not None and settings.path is None:
        return dataclasses.replace(settings, path="the argument teacher")
    if settings.path is not None or of_sources:
        return settings
    for field in dataclasses.fields(settings):
        if getattr(settings, field.name) != field.default:
            raise UserError(f"teacher.{field.name}: it needs teacher.path; set a model folder, a hub id or self.")
    return None


def check_tokenizers(other: Tokenizer | None, policy: Tokenizer, key: str) -> None:
    """Raises UserError if the tokenizer of the folder in the config key `key` gives a token another meaning."""
    if other is None:
        return
    for number in range(min(other.vocab_size, policy.vocab_size)):
        ours = policy.token(number)
        theirs = other.token(number)
        if ours != theirs and not any(token == f"<no token {number}>" for token in (ours, theirs)):
            raise UserError(
                f"{key}: its tokenizer is not that of the policy: token {number} is {theirs!r} there and {ours!r} "
                "here. It must have the tokenizer of the policy."
            )
