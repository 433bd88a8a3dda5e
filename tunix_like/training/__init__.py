"""The training loop, the compiled step, learners and supervised fine-tuning."""
