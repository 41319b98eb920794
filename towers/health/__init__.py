"""How a tower ends: every way to the last line that a person reads.

=========================================  ===========================================================================
what happens                               code that says it, in this order
=========================================  ===========================================================================
the script raises an exception             the hook of ``failure.install_hooks`` writes a ``FailureReport`` and ends the
                                           process; ``launching/attempt.py`` ends the other towers;
                                           ``launching/exit_report.py`` words what ``agent.run`` prints: the traceback,
                                           and last ``towers: tower 1 failed in step 3, backward: ValueError: …``
a tower is killed, or calls ``os._exit``   no report: ``exit_report._failure`` takes the exit code, and where the tower
                                           was from its ``status.StatusRecord``
a tower waits for one that is gone         a ``PeerLostError`` (``shared_memory/barrier.py``, or
                                           ``timeout_messages.connection_lost``), a consequence: it is reported two
                                           seconds late; ``Broadcast.first_failure`` finds the first one
a collective passes its deadline           ``timeout_messages.timeout_error`` queries the others by ``heartbeat.py``;
                                           the tower raises a ``CollectiveTimeoutError``
a tower loops for ever                     the same: a collective of the others passes its deadline (600 s)
towers wait for each other in a cycle      the chief's ``Heartbeat._find_deadlock`` publishes it; all of them raise a
                                           ``DeadlockError`` in ``Health.check_deadlock``
a step passes its deadline                 ``heartbeat._watch_steps`` reports a ``StepTimeoutError``, and ends the tower
NCCL finds an error or a timeout           ``collectives/nccl_watch.py`` reports it and ends the process
models differ when the programs end        ``mirrored/attached/last_check.py``, in the tower that ends last
the job is told to end (SIGTERM …)         ``Attempt.forward`` sends the signal to the towers. Those that save end
                                           with exit code 75: ``exit_report._preempted``; else the agent dies of the
                                           signal
another worker fails                       ``FailureBroadcast.listen`` receives it → ``Attempt.wait`` returns →
                                           ``Attempt.end``; the exit report prints what was received, exit code 1
the agent is gone                          ``failure.end_with_parent``, the parent watchdog, kills the tower
a tower ends early with exit code 0        ``exit_report._first_good_end``, once another tower has failed for it
all ends well                              ``process_group.leave_at_exit``; workers wait for each other in
                                           ``exit_report.make_exit_report``; nothing is printed
=========================================  ===========================================================================

Under ``mirrored.launch`` the towers send exceptions through pipes, and ``launching/launch.py`` raises a
``TowerFailedError`` in place of the last line. Under the user's own torchrun, torchrun prints the report.
"""
