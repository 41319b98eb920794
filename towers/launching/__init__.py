"""How one program becomes several towers: which process executes which command, with which variables.

``python train.py`` on a machine with two GPUs; a user's own script, so it can be run again::

    python train.py
    │   MirroredStrategy() → mirrored/strategy/kinds.py, _start_towers → job.become
    └─ exec, same process id ──▶ python …/towers '{"towers": 2, …}' python train.py         agent.main
         │   AGENT and STARTED_BY, JOB_TOKEN (new), GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME (loopback),
         │   OMP_NUM_THREADS (cores / towers)
         │   its forks run train.py, with torch loaded (fork_server.py):
         ├─ tower 0    writes to the terminal
         └─ tower 1    stdout discarded, stderr behind "[tower 1]" (console.Relay)
                 RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT and RUN_ID, as torchrun sets them; ERROR_FILE
                 and STATUS_RECORD
                 MirroredStrategy() → _join_towers → collectives/connecting.py, connect

The other ways to the same towers:

- ``mirrored run --towers 2 train.py`` is the agent (``agent.run``) from the start. It also sets DEVICES.
- ``TF_CONFIG=… python train.py`` on every worker: each process becomes an agent, ``{"towers": 1, "worker": 1,
  "workers": 2, "addresses": […], …}``. The agents meet at the chief's address (``meeting.py``). JOB_TOKEN is the
  user's. ``mirrored cluster`` starts such workers on one machine (``simulate_cluster.py``).
- ``torchrun`` or ``srun`` start the towers themselves. There is no agent of ``mirrored``.
- ``mirrored.launch(fn)``: the caller supervises. A fork server that has loaded torch forks the towers, with the
  variables that torchrun would set (``launch.py``).

There are three rooms: ``starting`` starts the processes, ``supervising`` decides when they end and reports how, and
``restarting`` is how agents meet and start again. ``job.py`` describes a job to its agent, and ``console.py`` prints
what towers write. The names of the variables are in :mod:`towers.topology`.
"""
