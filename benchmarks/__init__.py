"""Measurements that the documentation quotes. They run from the root of the repository; see README.md in this
folder."""
