"""Decoder models: one `Decoder` for all families.

Start with `decoder.py`, which computes hidden states and logits, each prompt once per group, with the layers of
`layers.py` and the attention of `attention.py` (kernels in `attention_kernels.py` and `attention_decoding.py`).
`families.py` and `hf_fields.py` translate config.json; `loading.py` and `opening.py` read weights
(`weights.py`, `gguf_files.py`) and export them. `lora.py` and `quantization.py` change what is trained and stored,
`sharding.py` places weights and batches on a mesh, and `log_probabilities.py` turns hidden states into
log-probabilities.
"""
