"""``mirrored doctor``: checks a machine for problems that would stop or slow down towers, and names the fix.

[Note: checks by trial] Whether towers can share memory or reach each other depends on more than a list of conditions
(sandboxes, firewalls, user namespaces). So the last checks start real towers with :func:`mirrored.launch`, which
average a bucket as in training. The earlier checks explain failures of these. There is no separate check for properties
that these towers test (loopback, shared memory), or for the output of ``python -m torch.utils.collect_env`` (driver,
CUDA, NCCL). A condition that only a running job can meet, such as a chief that has not started yet, is a warning and
not a problem.
"""

from __future__ import annotations

import platform
import socket
from collections.abc import Mapping

from mirrored.doctor import gpus, jobs, network, resources
from mirrored.doctor.findings import Check, Finding, Report, Severity, problem
from towers.system.timeouts import Deadline, run_with_timeout

__all__ = ["Finding", "Report", "Severity", "examine"]

_CHECKS: Mapping[str, Check] = {
    "versions": resources.check_versions,
    "GPUs": gpus.check,
    "CPU": resources.check_cores,
    "memory": resources.check_memory,
    "/dev/shm": resources.check_dev_shm,
    "disk": resources.check_disk,
    "limits": resources.check_limits,
    "variables": network.check_variables,
    "interfaces": network.check_interfaces,
    "TF_CONFIG": network.check_tf_config,
    "launcher": network.check_launcher,
    "CPU towers": jobs.check_cpu_towers,  # see [Note: checks by trial]
    "GPU towers": jobs.check_gpu_towers,
}


def examine(environ: Mapping[str, str], checks: Mapping[str, Check] = _CHECKS, seconds: float = 60.0) -> Report:
    """Checks this machine, for a program with the environment ``environ``.

    A check that raises an exception or does not return also becomes a finding. Each check runs in a thread, which is
    abandoned if it does not return in time: name servers and drivers may never answer.

    Args:
        checks: the checks by subject; default: all.
        seconds: the time for all of them together. Each check has shorter limits for its own waits.
    """
    deadline = Deadline(seconds)
    findings: list[Finding] = []
    for subject, check in checks.items():
        findings += _run(subject, check, environ, max(1.0, deadline.remaining()))
    return Report(
        host=socket.gethostname(),
        system=f"{platform.system()} {platform.release()} on {platform.machine()}",
        seconds=deadline.elapsed(),
        findings=tuple(findings),
    )


def _run(subject: str, check: Check, environ: Mapping[str, str], seconds: float) -> list[Finding]:
    findings: list[Finding] = []
    try:
        run_with_timeout(seconds, lambda: findings.extend(check(environ)))
    except TimeoutError as error:
        fix = "find out which service or device of this machine does not answer"
        findings.append(problem(subject, f"the check did not end: {error}", fix))
    except Exception as error:
        what = f"the check itself failed: {type(error).__name__}: {error}"
        findings.append(problem(subject, what, "please report it, with this line and the output of `mirrored doctor`"))
    return findings
