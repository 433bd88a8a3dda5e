"""Engines that generate outside of this process."""
