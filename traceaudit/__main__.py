"""``python -m traceaudit``."""

from traceaudit.cli import main

main()
