"""`python -m tra` is the same as `tra`."""

import sys

try:
    from tra.cli.main import main
except KeyboardInterrupt:
    print("tra: interrupted", file=sys.stderr)
    raise SystemExit(130) from None

main()
