"""``python -m deuteron``: the command line."""

from deuteron.tools.cli import main

main()
