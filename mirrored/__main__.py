"""``python -m mirrored …`` is the command ``mirrored …``."""

import sys

from mirrored.cli import main

sys.exit(main())
