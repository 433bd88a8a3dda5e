"""What a model is: its numbers, its layers, its weights on disk."""
