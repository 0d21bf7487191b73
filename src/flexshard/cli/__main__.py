"""``python -m flexshard.cli``."""

from flexshard.cli import main

main()
