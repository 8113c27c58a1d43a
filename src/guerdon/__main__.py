"""`python -m guerdon` is the same as the `guerdon` command."""

import sys

from guerdon.cli import main

sys.exit(main())
