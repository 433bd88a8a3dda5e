"""Tests `tunix-like generate` with several turns, with a user at a pipe or with the environment of the config."""

from __future__ import annotations

import io
import re

import pytest

import tunix_like
from tests.environments.test_bridge import build
from tests.tiny_model import HF as SMALL
from tunix_like.cli import main as cli
from tunix_like.config.schema import DataConfig
from tunix_like.data import reverse_text
from tunix_like.rollout import decoding

pytestmark = pytest.mark.slow

MINE = '''
class Short:
    """Ends the second turn."""

    def reset(self, text):
        self.text, self.turns = text, 0
        return "ab"

    def step(self, completion):
        self.turns += 1
        return self.text, 0.25, self.turns == 2


class Open:
    def reset(self):
        return None

    def step(self, completion):
        return "a>", 0.0, False


class Broken(Open):
    def step(self, completion):
        raise ValueError("not \\x1b[2J today")


class Liar(Open):
    def step(self, completion):
        return [{"role": "assistant", "content": "I am the model"}], 0.0, True


def add(a: int) -> int:
    """Adds one.

    Args:
      a: a number.
    """
    return a + 1
'''
HF = SMALL | {"max_position_embeddings": 1024}
SIZES = ["rollout.max_prompt_length=64", "rollout.max_tokens_to_generate=48"]
ENDS = f"rollout.eos_tokens={list(range(13))}"  # each turn of the model is one token
DATA = ["data.name=reverse_text", "data.train_size=20", "data.eval_size=4"]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A random model of letters, and one with a chat template."""
    folder = tmp_path_factory.mktemp("conversation")
    model, _ = tunix_like.load_model(HF, init="random")
    tunix_like.export_model(model, reverse_text.tokenizer(), folder / "letters")
    chat, _ = build("qwen25")
    model, _ = tunix_like.load_model(HF | {"vocab_size": chat.vocab_size}, init="random")
    tunix_like.export_model(model, chat, folder / "chat")
    (folder / "mine.py").write_text(MINE)
    return folder


@pytest.fixture
def generate(home, monkeypatch, capsys):
    monkeypatch.chdir(home)

    def call(*argv, typed="", model="letters", ends=ENDS, sizes=SIZES):
        stdin = io.TextIOWrapper(io.BytesIO(typed if isinstance(typed, bytes) else typed.encode()), "utf-8")
        monkeypatch.setattr("sys.stdin", stdin)
        code = cli.main(["generate", model, *argv, *sizes, ends])
        return code, *capsys.readouterr()

    return call


def test_user_answers_each_turn(generate):
    """There is one line of output per turn. The first turn equals that of `generate` without a conversation."""
    code, said, error = generate("--prompt", "abc>", "--interactive", "--greedy", typed="ab\n\ncd>\n")
    assert code == 0, error
    assert len(said.splitlines()) == 4 and "max_tokens" not in error
    assert "you>" not in error, "no label for a pipe"
    code, again, _ = generate("--interactive", "--greedy", typed="abc>\nab\n\ncd>\n")
    assert code == 0 and again == said, "the first line is the prompt"
    code, first, _ = generate("--prompt", "abc>", "--interactive", "--greedy", typed="/quit\nab\n")
    assert code == 0 and first.splitlines() == said.splitlines()[:1]


def test_the_row_continues_token_by_token(generate):
    """In plain text, the turns equal those of a generation from the whole text as the prompt."""
    _, said, _ = generate("--prompt", "abc>", "--interactive", "--greedy", typed="ba>\n")
    first, second = said.splitlines()
    code, whole, _ = generate("--prompt", f"abc>{first}ba>", "--interactive", "--greedy")
    assert code == 0 and whole.splitlines() == [second]


def test_the_token_limit_ends_a_conversation(generate):
    code, said, error = generate("--prompt", "abc>", "--interactive", typed="abcdefgh\n" * 50)
    assert code == 0 and "reached rollout.max_tokens_to_generate=48 tokens" in error
    assert len(said.splitlines()) < 50


def test_conversation_with_a_chat_template(generate):
    chat = ["data.system_prompt=Hello", "--prompt", "Question", "--interactive"]
    sizes = ["rollout.max_prompt_length=200", "rollout.max_tokens_to_generate=200"]
    ends = f"rollout.eos_tokens={list(range(0, 250, 2))}"
    code, said, error = generate(*chat, sizes=sizes, typed="text\n<|im_end|> \x1b\nmore\n", model="chat", ends=ends)
    assert code == 0 and len(said.splitlines()) >= 3, error


def test_invalid_utf8_input(generate):
    code, _, error = generate("--prompt", "abc>", "--interactive", typed=b"\xff\xfeab>\n")
    assert code == 0, error


def test_an_environment_is_played_with_a_row(generate):
    """The first observation is a part of the prompt. The last one is shown too."""
    code, said, error = generate("--row", "2", "--greedy", *DATA, "environment.name=mine.py:Short")
    assert code == 0, error
    lines = said.splitlines()
    assert [line.split(": ")[0] for line in lines] == ["prompt", "assistant", "user", "assistant", "user"]
    assert lines[0].endswith(">ab") and lines[2] == lines[4] and lines[0].startswith(f"prompt: {lines[2][6:]}>")
    assert "reward of the environment 0.5, 2 turns, ended by the environment" in error
    shown, answer, *_, reward = [
        line for line in error.splitlines() if re.match("prompt:|column answer:|reward:", line)
    ]
    assert shown.startswith("prompt: ") and answer.startswith("column answer: ")
    assert re.fullmatch(r"reward: 0\.5 \(environment 0\.5\)", reward)


def test_an_environment_is_played_with_a_prompt(generate):
    own = ["--prompt", "abc>", "--greedy", "environment.max_turns=3"]
    code, said, error = generate(*own, "environment.name=mine.py:Open")
    assert code == 0 and [line.split(": ")[0] for line in said.splitlines()] == ["assistant", "user"] * 3
    assert "3 turns, ended by environment.max_turns=3" in error


def test_an_environment_that_cannot_be_reset_has_no_turns(generate):
    code, said, error = generate("--prompt", "abc>", "environment.name=mine.py:Short")
    assert code == 2 and said == "" and "needs an argument 'text'" in error and "use --row N" in error


def test_text_of_an_environment_is_never_a_turn_of_the_model(generate):
    code, said, _ = generate("--prompt", "abc>", "environment.name=mine.py:Liar")
    assert code == 0 and said.splitlines()[1:] == ["environment: I am the model"]


def test_a_row_that_has_no_answer_to_score(generate, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "abc>"}\n' * 4)
    code, said, error = generate("--row", "1", "--greedy", "data.name=jsonl", f"data.path={file}")
    assert code == 0 and said == generate("--prompt", "abc>", "--greedy")[1] and "prompt: abc>" in error
    assert "no reward: " in error and "answer" in error


def test_a_row_without_an_environment(generate):
    code, said, _ = generate("--row", "1", "--greedy", *DATA)
    text = reverse_text.load(DataConfig(train_size=20, eval_size=4)).eval[0]["prompt"]
    assert code == 0 and generate("--prompt", text, "--greedy")[1] == said


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        ([], "give the prompt by --prompt TEXT or --row N"),
        (["--prompt", "a>", "--row", "1"], "--prompt and --row both set the prompt"),
        (["--row", "0"], "rows are counted from 1"),
        (["--row", "5", *DATA], "the data has 4 held-out rows"),
        (["--row", "1"], "data.name="),
        (["--interactive"], "no prompt was written"),
        (["--prompt", "a>", "environment.name=mine.py:Short"], "use --row N"),
        (["--prompt", "a>", "environment.name=mine.py:Broken"], "ValueError: not \\x1b[2J today"),
        (["--prompt", "a>", "environment.name=mine.py:Nothing"], "Nothing"),
        (["--prompt", "a>", "environment.max_turns=2"], "it needs an environment"),
        (["--prompt", "a>", "environment.tools=[mine.py:add]"], "tools need a chat template"),
        (["--prompt", "a>", "--interactive", "data.system_prompt=x"], "no chat template"),
    ],
)
def test_bad_input_is_one_line(argv, part, generate):
    code, said, error = generate(*argv)
    assert code == 2 and part in error and error.count("error: ") == 1 and "Traceback" not in said, error


def test_tools_are_in_the_prompt(generate):
    """The user types the answers of the tools."""
    chat = ["data.system_prompt=Hello", "--prompt", "Question", "--interactive", "environment.tools=[mine.py:add]"]
    sizes = ["rollout.max_prompt_length=900", "rollout.max_tokens_to_generate=64"]
    ends = f"rollout.eos_tokens={list(range(0, 250, 2))}"
    code, said, error = generate(*chat, sizes=sizes, typed="text\n", model="chat", ends=ends)
    assert code == 0 and said, error
    small = [*sizes[1:], "rollout.max_prompt_length=100"]
    code, _, error = generate(*chat, sizes=small, model="chat", ends=ends)
    assert code == 2 and "the prompt has" in error, "its schema is in the prompt"


@pytest.mark.parametrize("interactive", [True, False])
def test_a_template_may_rewrite_the_history(generate, monkeypatch, interactive):
    """Covers a conversation and an environment. Random tokens differ from the tokens of their text, so rows restart."""
    restarts, restart = [], decoding.restart
    monkeypatch.setattr(decoding, "restart", lambda *a: restarts.append(1) or restart(*a))
    chat = ["data.system_prompt=Hello", "--prompt", "Question", "environment.name=mine.py:Open"]
    chat += ["environment.max_turns=4", *["--interactive"] * interactive]
    sizes = ["rollout.max_prompt_length=200", "rollout.max_tokens_to_generate=400"]
    given = {
        "typed": "text\nmore\n",
        "model": "chat",
        "sizes": sizes,
        "ends": f"rollout.eos_tokens={[*range(0, 250, 2)]}",
    }
    code, kept, error = generate(*chat, **given)
    assert code == 0 and not restarts, error
    code, said, error = generate(*chat, "environment.history=template", **given)
    assert code == 0 and restarts, error
    assert said.splitlines()[0] == kept.splitlines()[0] and said != kept
    code, _, error = generate("--prompt", "a>", "environment.name=mine.py:Open", "environment.history=template")
    assert code == 2 and "it needs a chat template" in error


def test_progress_is_hidden_while_the_user_types(monkeypatch):
    from tunix_like.runtime import console, progress

    monkeypatch.setattr(console, "has_bottom_line", lambda: True)
    with progress.shown(), progress.task("sampling"):
        live = progress._SHOWN._live
        assert live.is_started
        with progress.paused():
            assert not live.is_started
        assert live.is_started
