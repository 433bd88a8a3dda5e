"""The library in Python: a model, a tokenizer, a reward function, one learner, `train`.

    python examples/library_use.py

A tiny random model learns to begin its answer with the letter it is given; about half a minute on two CPU cores. With
weights at hand, the first lines become `model, tokenizer = tunix_like.load_model("Qwen/Qwen2.5-0.5B-Instruct")`.
"""

import tokenizers
from tokenizers import models, pre_tokenizers

import tunix_like
from tunix_like import MaxRLConfig, MaxRLLearner, OptimizerConfig, RLTrainingConfig, RolloutConfig, Tokenizer

LETTERS = "abcdefgh"


def make_tokenizer() -> Tokenizer:
    vocabulary = {token: i for i, token in enumerate(["<eos>", "<unk>", *LETTERS])}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return Tokenizer(backend, eos_token="<eos>")


def copies_first(prompts: list[str], completions: list[str], **columns: list) -> list[float]:
    """1 where the completion starts with its prompt's letter, else 0."""
    return [float(c.split()[:1] == [p]) for p, c in zip(prompts, completions, strict=True)]


def main() -> dict:
    tokenizer = make_tokenizer()
    model, _ = tunix_like.load_model(
        {
            "model_type": "qwen2",
            "vocab_size": tokenizer.vocab_size,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32,
            "tie_word_embeddings": True,
        },
        init="random",
    )
    learner = MaxRLLearner(
        model=model,
        tokenizer=tokenizer,
        reward_fns=[copies_first],
        algo_config=MaxRLConfig(num_generations=16),
        # All that follows has defaults; these are for a tiny model and a short run.
        rollout_config=RolloutConfig(max_prompt_length=4, max_tokens_to_generate=4),
        training_config=RLTrainingConfig(
            max_steps=60, actor_optimizer=OptimizerConfig(learning_rate=1e-2), train_micro_batch_size=128
        ),
    )
    dataset = [{"prompt": letter} for letter in LETTERS]
    before = learner.evaluate(dataset).metrics["eval/pass@1"]
    last = learner.train(dataset)
    after = learner.evaluate(dataset).metrics["eval/pass@1"]
    print(f"pass@1 {before:.2f} -> {after:.2f} after {last['step']} steps; reward {last['train/rewards/mean']:.2f}")
    return {"before": before, "after": after}


if __name__ == "__main__":
    main()
