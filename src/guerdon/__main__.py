"""Runs the `guerdon` command as `python -m guerdon`."""

import sys

from guerdon.cli import main

sys.exit(main())
