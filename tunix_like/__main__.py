"""Runs the command `tunix-like` for `python -m tunix_like`."""

import sys

from tunix_like.cli.main import main

sys.exit(main())
