"""How started towers end: ``attempt.py`` waits for them and reports; ``failure_broadcast.py`` tells others.

All starters use it. A failure on another worker arrives through the broadcast, and ends the attempt here, too.
"""
