"""Provides engines that generate completions with servers outside of this process."""
