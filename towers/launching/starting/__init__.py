"""How towers start: the agent or ``launch`` starts the processes, as forks of a server that has loaded torch.

``agent.py`` is the process that starts and supervises the towers of a worker, on torchrun's engine. ``launch.py`` does
the same for a function of a test or a notebook, and ``simulate_cluster.py`` starts several agents on one machine.
``fork_server.py`` forks the agent's towers; multiprocessing's own server, with ``preloaded.py``, those of ``launch``.
"""
