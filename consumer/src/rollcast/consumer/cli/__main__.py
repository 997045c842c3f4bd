"""`python -m rollcast.consumer.cli`, where the `rollcast` command is not on the path."""

from rollcast.consumer.cli import main

main()
