"""Snakemake, but it asks Slurm every second; the plugin itself waits ten seconds longer each time nothing has ended."""

import sys

from snakemake.cli import main
from snakemake_interface_executor_plugins.executors.remote import RemoteExecutor

RemoteExecutor.next_seconds_between_status_checks = property(lambda self: 1, lambda self, seconds: None)
main(sys.argv[1:])
