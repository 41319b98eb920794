"""How agents meet, once for each attempt at a job, and which towers the next attempt has.

``rendezvous.py`` serves the store of a single worker, and ``meeting.py`` that of several: they compare the description
of their cluster, and with restarts the chief starts each attempt. ``keepalive.py`` detects lost agents and hosts.
``restarts.py`` runs one attempt after the other, by the rules in ``policy.py``.
"""
