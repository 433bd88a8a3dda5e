"""What `pip install tunix-like` brings: each dependency with its reason. Lower bounds are versions that were run."""

import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

CORE = [
    "jax>=0.10.2",  # arrays, jit, gradients, sharding
    "flax>=0.12.8",  # NNX modules: the decoder
    "optax>=0.2.8",  # AdamW, clipping, schedules
    "orbax-checkpoint>=0.12.8",  # asynchronous, atomic, sharded checkpoints
    "filelock>=4.2",  # the lock of a run folder, also on file systems that several hosts share
    "grain>=0.2.18",  # a data stream whose place can be saved and restored
    "ml-collections>=1.1.0",  # the locked tree that a YAML file and key=value overrides are merged in
    "numpy>=2.1.0",  # host arrays
    "scipy>=1.14.1",  # the incomplete beta function of exact confidence intervals; jax brings it
    "jaxtyping>=0.3.11",  # shapes in signatures, checked by the tests
    "safetensors>=0.7.0",  # weights in and out, in Hugging Face's format; google-tunix 0.1.7 needs it below 0.8
    "tokenizers>=0.23.1",  # tokenizer.json, without transformers
    "jinja2>=3.1.6",  # chat templates, sandboxed, without transformers
    "math-verify>=0.9.0",  # equality of mathematical answers where comparing numbers does not settle it
    "pyyaml>=6.0.3",  # configuration files
    "rich>=15.0.0",  # tables and progress bars on a terminal
    "matplotlib>=3.9.2",  # the picture of `tunix-like advantages --plot`; loaded only when it is drawn
    # TensorBoard itself: tensorboardX loads torch wherever that is installed, and clu needs TensorFlow.
    "tensorboard>=2.21.0",  # event files of the metrics, and the program that shows them
]

EXTRAS = {
    "cuda12": ["jax[cuda12]>=0.10.2"],  # NVIDIA GPUs, CUDA 12
    "cuda13": ["jax[cuda13]>=0.10.2"],  # NVIDIA GPUs, CUDA 13
    "tpu": ["jax[tpu]>=0.10.2"],  # Cloud TPUs
    "pathways": ["pathwaysutils>=0.1.13"],  # Cloud TPUs through Pathways
    "hub": [
        "huggingface_hub>=2.4.0",  # models by hub id
        "datasets>=4.0",  # data sets by hub id
    ],
    "gguf": ["gguf>=0.19"],  # models in GGUF, the format of llama.cpp and Ollama
    "reasoning-gym": ["reasoning-gym>=0.1.25"],  # generated problems with scores: data.name=reasoning_gym
    "gcs": ["gcsfs>=2026.9"],  # models, data, runs and exports in gs://
    "s3": ["s3fs>=2026.9"],  # the same in s3://
    "vllm": ["aiohttp>=3.14"],  # concurrent requests to the servers of rollout.engine: vllm
    # Sessions of OpenEnv servers. The package openenv is for servers: about 100 packages, gradio and pandas among them.
    "openenv": ["websockets>=15.0.1"],
    # Environments of the Environments Hub. It brings about 95 packages, clients of several providers among them, and
    # needs openai below 3, so it cannot be installed beside the extra judges.
    "envs": ["verifiers>=0.4.0"],
    "serve": [
        "starlette>=1.10.0",  # routes, requests and streamed answers of `tunix-like serve`
        "uvicorn>=0.54.0",  # the HTTP server under it
        "pydantic>=2.12",  # reads and checks the requests
        "prometheus-client>=0.22",  # the metrics
    ],
    "judge": ["aiohttp>=3.14"],  # concurrent requests to the server of rewards.functions: judge, served_reward_model
    "wandb": ["wandb>=0.31.0"],  # metrics to Weights & Biases
    "trackio": ["trackio>=0.43.0"],  # metrics to trackio
    "prometheus": ["prometheus-client>=0.22"],  # metrics of a run for Prometheus, as in serve
    "test": [  # what plain `pytest` needs
        "pytest>=9.2.0",
        "pytest-xdist>=3.8.0",  # two workers on two cores
        "beartype>=0.23.1",  # checks the jaxtyping signatures while the tests run
        "hypothesis>=6.170",  # properties over generated inputs
        "gguf>=0.19",  # as in the extra gguf
        "aiohttp>=3.14",  # as in vllm and judge, whose servers the tests also play
        "websockets>=15.0.1",  # as in openenv
        "starlette>=1.10.0",  # as in serve
        "uvicorn>=0.54.0",
        "pydantic>=2.12",
        "prometheus-client>=0.22",  # as in serve and prometheus
        "httpx>=0.28.1",  # plain requests to it
        "fsspec>=2026.1",  # what the extras gcs and s3 are implementations of
        "nbformat>=5.11.1",  # reads and checks the notebooks of examples/notebooks
    ],
    "judges": [  # other implementations, which the results are compared with; without one its tests are skipped
        "transformers>=5.23.0",  # models, tokenizers and exports
        "torch==2.13.0",  # what transformers runs on; never imported outside the tests
        "peft>=0.21.2",  # adapters
        "trl>=1.16.0",  # losses of pairs; brings datasets
        "openai>=3.54.0",  # the client of `serve`
        "anthropic>=2.14.0",  # the client of its other protocol
        "playwright>=1.65",  # drives a Chromium of the machine, where there is one, through the page of `report`
        "nbclient>=0.11.0",  # runs the notebooks
        "ipykernel>=7.4.0",  # in a real kernel
        "pandas>=3.1.1",  # reads rollouts and metrics as the documentation says
        "reasoning-gym>=0.1.25",  # the extra reasoning-gym
    ],
    "docs": [
        "mkdocs-material>=9.7",  # the pages of docs/ as a site
        "mkdocstrings[python]>=1.0",  # docs/api.md from docstrings
        "ruff>=0.17.5",  # breaks their signatures into lines
        "latex2mathml>=3.78",  # formulas, which browsers then draw without a script
    ],
    "dev": [
        "ruff>=0.17.5",  # linter and formatter
        "mypy>=2.4.1",  # type checker
        "types-PyYAML>=6.0.12",
        "build>=1.5",  # the source archive and the wheel
    ],
}

# as `SHIPPED` in tunix_like/config/yaml_files.py
EXAMPLES = ("maze*.yaml", "debug/*.yaml", "gsm8k/*.yaml", "smollm2/*.yaml")


class BuildWithExamples(build_py):
    """Puts the configs of `examples/` into the package, so that `tunix-like train maze` works from a wheel."""

    def run(self) -> None:
        super().run()
        files = [file for pattern in EXAMPLES for file in Path("examples").glob(pattern)]
        for file in () if self.editable_mode else files:  # a checkout has them beside the package
            target = Path(self.build_lib) / "tunix_like" / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)


setup(
    name="tunix-like",
    version="0.3.0",
    description="Reinforcement-learning post-training of language models in JAX and Flax NNX",
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_packages(include=["tunix_like*"]),
    package_data={"tunix_like": ["config/base_config.yaml", "py.typed", "report/static/*", "cli/starts/*"]},
    install_requires=CORE,
    extras_require=EXTRAS,
    cmdclass={"build_py": BuildWithExamples},
    entry_points={"console_scripts": ["tunix-like = tunix_like.cli.main:main"]},
)
