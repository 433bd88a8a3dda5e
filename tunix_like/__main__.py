"""`python -m tunix_like` is the command `tunix-like`."""

import sys

from tunix_like.cli.main import main

sys.exit(main())
