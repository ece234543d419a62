"""`python -m tra` is the same as `tra`."""

from tra.cli.main import main

main()
