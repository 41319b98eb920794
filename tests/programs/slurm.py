"""SLURM's commands, played: ``slurm.py srun …`` starts a step's tasks, ``slurm.py scontrol …`` writes down its words.

TASKS is a JSON list: for each task the words that bring a command to its node, and its variables. PROGRAM is run in
place of the script that is named after ``python``. As srun does, it passes signals on and returns the highest exit
code.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys

kind, *words = sys.argv[1:]
with pathlib.Path(os.environ["COMMANDS"]).open("a") as file:
    file.write(" ".join([kind, *words]) + "\n")
if kind == "srun":
    assert words[1] == "python"
    program = [sys.executable, *json.loads(os.environ["PROGRAM"])]
    tasks = [
        subprocess.Popen([*before, *program], env={**os.environ, **variables})
        for before, variables in json.loads(os.environ["TASKS"])
    ]
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: [task.send_signal(number) for task in tasks])
    pathlib.Path(os.environ["COMMANDS"] + ".pid").write_text(str(os.getpid()))
    codes = [task.wait() for task in tasks]
    sys.exit(max(code if code >= 0 else 128 - code for code in codes))
