"""`python -m understudy`."""

from understudy.cli.main import main

main()
