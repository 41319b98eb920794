"""How a tower ends: every way to the last line that the user reads.

=========================================  ===========================================================================
event                                      code that handles and reports it, in this order
=========================================  ===========================================================================
the script raises an exception             the hook of ``failure.install_hooks`` writes a ``FailureReport`` and ends the
                                           process; ``supervising/attempt.py`` ends the other towers;
                                           ``attempt.ending_of`` composes the output of ``agent.run``: the
                                           traceback, then
                                           ``mirrored: tower 1 failed in step 3, backward: ValueError: …``
a tower is killed, or calls ``os._exit``   there is no report: ``attempt._failure`` takes the exit code, and the
                                           tower's position from its ``status.StatusRecord``
a tower waits for a tower that is gone     a ``PeerLostError`` (``collectives/shared_memory/barrier.py``, or
                                           ``timeout_messages.connection_lost``), a consequence:
                                           ``FailureBroadcast.first_failure`` finds the cause
a collective passes its deadline           ``timeout_messages.timeout_error`` queries the others through
                                           ``heartbeat.py``; the tower raises a ``CollectiveTimeoutError``
a tower loops forever                      the same: a collective of the others passes its deadline (600 s)
towers wait for each other in a cycle      the chief's ``Heartbeat._look_for_deadlock`` publishes it; all of them raise
                                           a ``DeadlockError`` in ``Health.check_deadlock``
a tower waits for a GPU's in another call  the same, by ``deadlock.find_different_calls``
a step passes its deadline                 ``heartbeat._watch_steps`` reports a ``StepTimeoutError``, and ends the tower
NCCL finds an error or a timeout           ``nccl.watch`` reports it and ends the process
models differ when the programs end        ``mirrored/attached/mirror_check.py``, in the tower that ends last
the job receives SIGTERM or a similar      ``Attempt.forward`` sends the signal to the towers. Towers that save end with
signal                                     exit code 75: ``attempt._preempted``; otherwise the agent dies of the
                                           signal
another worker fails                       ``FailureBroadcast.listen`` receives it → ``Attempt.wait`` returns →
                                           ``Attempt.end`` → ``attempt.ending_of``: the received failure, exit code 1
the agent is gone                          ``failure.end_with_parent``, the parent watchdog, kills the tower
a tower ends early with exit code 0        ``attempt._first_good_end``, after another tower has failed because of it
all towers end well                        ``process_group.leave_at_exit``; workers wait for each other in
                                           ``attempt.ending_of``; nothing is printed
=========================================  ===========================================================================

Under ``mirrored.launch``, the towers send exceptions through pipes, and ``starting/launch.py`` raises a
``TowerFailedError`` instead of printing a last line. Under the user's own torchrun, torchrun prints the report.
"""
