"""Measurements that the documentation quotes; run from the root of the repository, see README.md here."""
