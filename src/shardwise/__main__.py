"""`python -m shardwise` is the command line."""

from shardwise.cli.app import main

main()
