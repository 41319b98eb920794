"""The Ray cluster that servers and workers run in: one of this machine, started here and ended with the script."""

from __future__ import annotations

import logging
import os
import secrets
from typing import Any

import ray


class Cluster:
    """A Ray cluster; this process is its driver.

    Attributes:
        origin: what it was started by, for the log.
    """

    def __init__(self) -> None:
        """Take the one that this process is in; else start one on this machine, which whoever joins it has to know a
        secret of this job's for.
        """
        self.origin = "this script"
        if ray.is_initialized():
            self.origin = "the Ray cluster of this process"
            return
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # Ray asks for it from 2.59 on
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(address="local", include_dashboard=False, logging_level=logging.ERROR)

    def start(self, kind: type, *arguments: Any) -> Any:
        """Start an actor; returns its handle."""
        return ray.remote(kind).options(num_cpus=0, max_restarts=0).remote(*arguments)
