"""`python -m kvq_cli` is `kvq`."""

from kvq_cli.main import main

main()
