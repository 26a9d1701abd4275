"""``python -m microddp``."""

from __future__ import annotations

import sys

from microddp.cli import main

if __name__ == "__main__":
    sys.exit(main())
