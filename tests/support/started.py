"""``python -m tests.support.started``: commands whose agents wait for every tower (:mod:`tests.support.patience`).

- ``mirrored WORDS …`` is the command ``mirrored``.
- ``agent JOB WORDS …`` is the agent of a job, given as JSON, whose towers run Python with these words.
- ``call MODULE:FUNCTION ARGUMENTS`` calls a function of the tests with a JSON list; it may return an exit code.
"""

import importlib
import json
import sys

from tests.support.patience import make_agent_patient


def main(kind: str, *words: str) -> int | None:
    make_agent_patient()
    if kind == "mirrored":
        from mirrored import cli

        return cli.main(words)
    if kind == "agent":
        from towers.launching.starting import agent

        agent.main([words[0], sys.executable, *words[1:]])
    module, _, name = words[0].partition(":")
    code: int | None = getattr(importlib.import_module(module), name)(*json.loads(words[1]))
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
