"""Implements the training loop, the compiled training step, the RL learners and supervised fine-tuning."""
