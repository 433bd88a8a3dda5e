"""The smallest model that the letters of `reverse_text` can be trained with, as an HF config."""

HF = {
    "model_type": "qwen2",
    "vocab_size": 13,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
