"""`python -m tra` is the same as `tra`: it imports nothing that lies in the working folder."""

import os
import sys

_HOME = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120 - pathlib may lie there, too
try:
    if sys.path[0] == os.getcwd() != _HOME:  # noqa: PTH109
        del sys.path[0]
except FileNotFoundError:  # the folder is gone
    pass

try:
    from tra.cli.main import main
except KeyboardInterrupt:
    print("tra: interrupted", file=sys.stderr)
    raise SystemExit(130) from None

main()
