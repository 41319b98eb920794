"""Makes all checks, whatever becomes of each of them."""

from __future__ import annotations

import platform
import socket
import time
from collections.abc import Mapping

from mirrored.doctor import (
    cores,
    disk,
    gpus,
    interfaces,
    launchers,
    limits,
    listening,
    memory,
    names,
    sharing,
    tf_config,
    towers_on_cpus,
    towers_on_gpus,
    variables,
    versions,
)
from mirrored.doctor.finding import Check, Finding, problem
from mirrored.doctor.report import Report
from towers.system.timeouts import run_with_timeout

_CHECKS: Mapping[str, Check] = {
    "versions": versions.check,
    "GPUs": gpus.check,
    "CPU": cores.check,
    "memory": memory.check,
    "/dev/shm": memory.check_dev_shm,
    "disk": disk.check,
    "limits": limits.check,
    "variables": variables.check,
    "host name": names.check,
    "interfaces": interfaces.check,
    "ports": listening.check,
    "TF_CONFIG": tf_config.check,
    "launcher": launchers.check,
    "shared memory": sharing.check,
    "CPU towers": towers_on_cpus.check,
    "GPU towers": towers_on_gpus.check,
}


def examine(environ: Mapping[str, str], checks: Mapping[str, Check] = _CHECKS, seconds: float = 60.0) -> Report:
    """Look at this machine, as a program with the environment ``environ`` would find it.

    A check that fails itself, or does not come back, is a finding, too.

    Args:
        checks: by subject; default: all.
        seconds: for all of them together; what a check waits for has a limit of its own, and a shorter one.
    """
    started = time.monotonic()
    findings: list[Finding] = []
    for subject, check in checks.items():
        findings += _made(subject, check, environ, max(1.0, started + seconds - time.monotonic()))
    return Report(
        host=socket.gethostname(),
        system=f"{platform.system()} {platform.release()} on {platform.machine()}",
        seconds=time.monotonic() - started,
        findings=tuple(findings),
    )


def _made(subject: str, check: Check, environ: Mapping[str, str], seconds: float) -> list[Finding]:
    findings: list[Finding] = []
    try:
        run_with_timeout(seconds, lambda: findings.extend(check(environ)))
    except TimeoutError as error:
        findings.append(problem(subject, f"the check did not end: {error}", "see what on this machine does not answer"))
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        what = f"the check itself failed: {type(error).__name__}: {error}"
        findings.append(problem(subject, what, "please report it, with this line and the output of `mirrored doctor`"))
    return findings
