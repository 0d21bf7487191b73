"""``python -m flexshard``."""

from flexshard.cli import main

main()
