"""`python -m tra` is the same as `tra`."""

from tra.cli import main

main()
