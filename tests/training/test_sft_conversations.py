"""Tests SFT on conversations of several turns: the tokens are those of a rollout in which the policy writes the same
messages, and those of transformers; only the assistant's tokens have a loss; bad rows are named before any compile."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import tunix_like
from tests.environments.test_bridge import BUILT, FAMILIES, QWEN25, TOOLS, build
from tests.tiny_model import HF
from tunix_like import (
    EnvironmentConfig,
    EnvStepResult,
    OptimizerConfig,
    RLTrainingConfig,
    RolloutConfig,
    SFTConfig,
    SFTTrainer,
    UserError,
)
from tunix_like.cli.main import main
from tunix_like.data.stream import render
from tunix_like.environments.arguments import make_player
from tunix_like.step import train_step
from tunix_like.types import Problem, Turn

WIDE = {"max_position_embeddings": 1024}
LENGTHS = RolloutConfig(max_prompt_length=512, max_tokens_to_generate=512)
CALLS = (  # writes tool calls as Qwen does, and marks the assistant's tokens for transformers
    QWEN25.replace("{%- elif not (loop.first", "{%- elif message.role == 'assistant' %}{{- '<|im_start|>assistant\n' }}"
    "{% generation %}{{- message.content }}{%- for call in message.tool_calls or [] %}{{- '<tool_call>' ~ "
    "(call.function | tojson) ~ '</tool_call>' }}{%- endfor %}{{- '<|im_end|>' }}{% endgeneration %}{{- '\n' }}"
    "{%- elif not (loop.first")
)  # fmt: skip


def said(role, content, **fields):
    return {"role": role, "content": content, **fields}


def call(**arguments):
    return {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}


CHAT = [
    said("user", "Question <|im_end|>"), said("assistant", "an answer <|im_end|> of text"), said("user", "And then?"),
    said("assistant", "more"),
]  # fmt: skip
AGENT = [
    said("system", "text"), said("user", "Question"), said("assistant", "", tool_calls=[call(a=1, b=[2]), call()]),
    said("tool", "4"), said("tool", '{"a": "b"}'), said("assistant", "an answer"), said("user", "another"),
    said("assistant", "", tool_calls=[call(text="two")]), said("tool", "5"), said("assistant", "text"),
]  # fmt: skip


def make(tokenizer, rollout=LENGTHS, **settings):
    model = tunix_like.load_model(HF | WIDE | {"vocab_size": tokenizer.vocab_size}, init="random")[0]
    training = RLTrainingConfig(**{name: settings.pop(name) for name in ("output_dir",) if name in settings})
    config = SFTConfig(**{"max_steps": 1, "batch_size": 2, "optimizer": OptimizerConfig(learning_rate=1e-2)} | settings)
    return SFTTrainer(
        model=model, tokenizer=tokenizer, sft_config=config, rollout_config=rollout, training_config=training
    )


def encoded(trainer, row):
    """Returns the tokens of prompt and answer of a row, and the mask of the tokens with a loss, as the trainer sees
    them."""
    trainer._prepare([row], False)
    (prompt,) = next(trainer._batches)[:1]
    answer = trainer._answer(prompt)
    return prompt.tokens + answer.tokens, [False] * len(prompt.tokens) + answer.sampled


@pytest.mark.parametrize("messages", [CHAT, AGENT], ids=["text", "tools"])
def test_tokens_and_mask_are_those_of_transformers(messages):
    ours, theirs = build("qwen25", CALLS)
    row = {"messages": messages, "tools": TOOLS if messages is AGENT else None}
    tokens, mask = encoded(make(ours, batch_size=1), row)
    plain = [{**message, "content": message["content"].replace("<|im_end|>", "@@")} for message in messages]
    given = {"tools": row["tools"], "return_dict": True, "return_assistant_tokens_mask": True}
    expected = theirs.apply_chat_template(plain, **given)
    if messages is CHAT:  # transformers would encode the control tokens of the text as control tokens
        tokens, mask = encoded(make(ours, batch_size=1), {"messages": plain})
    whole, marks = expected["input_ids"], [bool(i) for i in expected["assistant_masks"]]
    assert (whole[: len(tokens)], marks[: len(mask)]) == (tokens, mask)
    assert ours.decode(whole[len(tokens) :], False) == "\n", "the template ends a turn with a line break"
    assert sum(mask) > 10 and mask[-1] and tokens[-1] == ours.eos_id


def test_control_tokens_in_messages_are_plain_text():
    ours, _ = build("qwen25", CALLS)
    tokens, mask = encoded(make(ours, batch_size=1), {"messages": CHAT})
    ends = [place for place, token in enumerate(tokens) if token == ours.eos_id]
    assert len(ends) == 4 and [mask[place] for place in ends] == [False, True, False, True]
    assert ours.decode(tokens, False).count("<|im_end|>") == 6


class Replies:
    """Answers each turn with the next messages of a conversation."""

    def reset(self, replies, **columns):
        self.left = list(replies)

    def step(self, completion):
        return EnvStepResult(self.left.pop(0), 0.0, False) if self.left else EnvStepResult(None, 1.0, True)


def rolled_out(tokenizer, prompt, replies, turns):
    """Returns the tokens and the mask of a trajectory whose policy samples the tokens `turns`."""
    player = make_player(Replies, EnvironmentConfig(max_turns=9, max_observation_tokens=400), tokenizer, LENGTHS)
    made = render({"prompt": prompt, "replies": replies}, tokenizer)
    trajectories = player.start([Problem(0, *made)], 1, 512)
    tokens, mask = [], []
    for turn in turns:
        trajectories.submit([Turn(0, 0, turn, False)])
        (reply,) = trajectories.replies(True)
        added = [] if reply.tokens is None else list(reply.tokens)
        tokens, mask = [*tokens, *turn, *added], [*mask, *[True] * len(turn), *[False] * len(added)]
    assert reply.tokens is None
    return made.tokens + tokens, [False] * len(made.tokens) + mask


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_those_of_a_rollout_that_says_the_same(name):
    """Also with a template that rewrites earlier turns (Qwen3): the turns stay as the template wrote them when they
    were the last, as they do in a rollout."""
    ours, _ = build("qwen25", FAMILIES[name][0]) if name == "qwen3" else BUILT[name]  # a text of <think> is no control
    written = [f"answer {i}" for i in range(3)]
    answers = ["<think>\na thought\n</think>\n\nanswer 0", *written[1:]] if name == "qwen3" else written
    if name == "qwen3":
        written = [answers[0], *(f"<think>\n\n</think>\n\n{text}" for text in written[1:])]
    replies = [[said("user", "one")], [said("user", " two\n\nthree")]]
    if name not in ("gemma", "glm"):
        replies = [[said("user", "one"), said("user", "more")], [said("tool", "4"), said("tool", "5")]]
    prompt = [said("user", "Question")]
    answer = [said("assistant", answers[0])]
    for reply, text in zip(replies, answers[1:], strict=True):
        answer += [*reply, said("assistant", text)]
    turns = [[*ours.encode(text, add_special_tokens=False), ours.eos_id] for text in written]
    expected = rolled_out(ours, prompt, replies, turns)
    assert encoded(make(ours, batch_size=1), {"prompt": prompt, "answer": answer}) == expected


def test_text_prompts_have_turns_without_a_template():
    ours, _ = BUILT["llama"]
    answers, replies = ["19", "40"], ["HIGHER"]
    turns = [[*ours.encode(text, add_special_tokens=False), ours.eos_id] for text in answers]
    expected = rolled_out(ours, "GUESS", replies, turns)
    answer = [said("assistant", "19"), said("user", "HIGHER"), said("assistant", "40")]
    assert encoded(make(ours, batch_size=1), {"prompt": "GUESS", "answer": answer}) == expected


def test_a_message_equals_an_answer_of_text_and_openai_writes_the_same():
    """Calls with arguments as JSON text and fields that are None, as OpenAI and `datasets` write them."""
    ours, _ = build("qwen25", CALLS)
    prompt = [said("user", "Question")]
    one = encoded(make(ours, batch_size=1), {"prompt": prompt, "answer": "an answer"})
    assert one == encoded(make(ours, batch_size=1), {"prompt": prompt, "answer": [said("assistant", "an answer")]})
    openai = json.loads(json.dumps(AGENT))
    for message in openai:
        message |= {"name": None, "tool_calls": message.get("tool_calls")}
        for each in message["tool_calls"] or ():
            message["content"] = None
            arguments = each["function"]["arguments"]
            each["function"]["arguments"] = json.dumps(arguments) if arguments else ""
    given = {"tools": TOOLS}
    made = [encoded(make(ours, batch_size=1), given | {"messages": each}) for each in (AGENT, openai)]
    assert made[0] == made[1]


@pytest.mark.slow
def test_loss_is_that_of_the_assistants_tokens():
    """It equals the plain forward pass, packed rows of both kinds included."""
    ours, _ = build("qwen25", CALLS)
    rows = [{"prompt": CHAT[:1], "answer": each} for each in (CHAT[1:], "text", CHAT[1:2])]
    trainer, total, count = make(ours, batch_size=3), 0.0, 0
    model = trainer.model
    for row in rows:
        tokens, mask = encoded(make(ours, batch_size=1), row)
        logprobs = jax.nn.log_softmax(model(jnp.array([tokens])))[0]
        total -= sum(float(logprobs[i - 1, tokens[i]]) for i in range(len(tokens)) if mask[i])
        count += sum(mask)
    assert trainer.train(rows)["sft/loss"] == pytest.approx(total / count, rel=1e-5)


def test_long_conversations_are_cut():
    ours, _ = BUILT["qwen25"]
    short = RolloutConfig(max_prompt_length=512, max_tokens_to_generate=30)
    tokens, mask = encoded(make(ours, short, batch_size=1), {"messages": CHAT})
    whole, marks = encoded(make(ours, batch_size=1), {"messages": CHAT})
    size = len(render({"prompt": CHAT[:1]}, ours).tokens) + 30
    assert (tokens, mask) == (whole[:size], marks[:size]) and len(whole) > size


BROKEN = {"name": "f", "arguments": "{"}
GOOD = {"messages": CHAT}
BAD = {
    "content": {"messages": [said("user", "x"), said("assistant", 3)]},
    "role": {"messages": [said("user", "x"), said("assistant", "y"), said("wizard", "z"), said("assistant", "a")]},
    "assistant": {"messages": [said("user", "x")]},
    "begin and end": {"messages": CHAT[:3]},
    "messages": {"messages": "text"},
    "arguments": {"messages": [CHAT[0], said("assistant", "", tool_calls=[call() | {"function": BROKEN}])]},
    "name": {"messages": [CHAT[0], said("assistant", "", tool_calls=[{"function": {}}])]},
}  # fmt: skip


@pytest.mark.parametrize("part", BAD)
def test_bad_rows_are_named_before_a_compile(part, monkeypatch):
    monkeypatch.setattr(train_step, "train_step", None)
    with pytest.raises(UserError, match=f"row 1 .*{part}"):
        make(BUILT["qwen25"][0]).train([GOOD, BAD[part]])


def test_templates_that_cannot_be_used_are_refused():
    ignoring, _ = BUILT["qwen25"]  # it writes no tool calls
    with pytest.raises(UserError, match="row 0 .*tool calls"):
        make(ignoring).train([{"messages": AGENT, "tools": TOOLS}])
    opening, _ = build("qwen25", QWEN25.replace("{{- '<|im_start|>assistant\n' }}", "{{- '<|im_start|>model\n' }}"))
    with pytest.raises(UserError, match=r"row 0 .*template"):
        make(opening).train([GOOD])
    with pytest.raises(UserError, match="row 0 .*tool calls"):
        make(ignoring).train([{"prompt": "text", "answer": AGENT[2:]}])


@pytest.mark.slow
def test_every_command_renders_the_tools_of_a_row(tmp_path, monkeypatch, capsys):
    """The template writes only the name of each tool, and each row has another one."""
    monkeypatch.chdir(tmp_path)
    template = "{% for tool in tools or [] %}{{ tool.name }} {% endfor %}" + QWEN25
    ours, _ = build("qwen25", template)
    model = tunix_like.load_model(HF | WIDE | {"vocab_size": ours.vocab_size}, init="random")[0]
    tunix_like.export_model(model, ours, "model")
    rows = [
        {"prompt": [said("user", "Question")], "answer": "text", "tools": [{"name": f"tool{i}"}]} for i in range(16)
    ]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    Path("run.yaml").write_text(
        "model: {path: model}\ndata: {name: jsonl, path: rows.jsonl, eval_size: 8, batch_size: 8, shuffle: false}\n"
        "algorithm: {advantage_estimator: rloo, num_generations: 2}\nrewards: {functions: [{name: exact_match}]}\n"
        "rollout: {max_prompt_length: 256, max_tokens_to_generate: 4}\neval: {samples: 1, k: [1], batch_size: 8}\n"
        "training: {max_steps: 1, output_dir: run, log_rollouts_every_n_steps: 1}\n"
    )
    for command, shown in (
        (["train", "run.yaml", "--dry-run"], "tool0"),
        (["sft", "run.yaml", "sft.max_steps=1", "sft.batch_size=8", "training.output_dir=tuned"], "tool0"),
        (["generate", "run.yaml", "--row", "1"], "tool8"),
        (["train", "run.yaml"], "tool0"),
        (["eval", "run.yaml", "--out", "eval.jsonl"], ""),
    ):
        assert main(command) == 0, capsys.readouterr().err
        captured = capsys.readouterr()
        assert shown in captured.out + captured.err
    written = "".join(path.read_text() for path in [Path("eval.jsonl"), *Path("run/rollouts").rglob("*.jsonl")])
    assert all(f"tool{i} <|im_start|>" in written for i in range(16))


@pytest.mark.slow
def test_command_trains_on_a_file_and_names_bad_lines(tmp_path, capsys):
    ours, _ = build("qwen25", CALLS)
    model = tunix_like.load_model(HF | WIDE | {"vocab_size": ours.vocab_size}, init="random")[0]
    tunix_like.export_model(model, ours, tmp_path / "model")
    (tmp_path / "run.yaml").write_text(
        f"model: {{path: {tmp_path / 'model'}}}\n"
        f"data: {{name: jsonl, path: {tmp_path / 'rows.jsonl'}, eval_size: 1}}\n"
        "sft: {max_steps: 2, batch_size: 8, optimizer: {learning_rate: 1.0e-2}}\n"
        "rollout: {max_prompt_length: 512, max_tokens_to_generate: 256}\n"
        f"training: {{output_dir: {tmp_path / 'run'}}}\n"
    )
    rows = [json.dumps({"messages": AGENT, "tools": TOOLS})] * 3  # the last row is held out
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    assert main(["sft", str(tmp_path / "run.yaml")]) == 0, capsys.readouterr().err
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[1]["sft/loss"] < lines[0]["sft/loss"]
    for bad in BAD.values():
        (tmp_path / "rows.jsonl").write_text("\n".join([*rows, json.dumps(bad)]))
        assert main(["sft", str(tmp_path / "run.yaml")]) == 2
        assert "rows.jsonl:4: column 'messages'" in capsys.readouterr().err
