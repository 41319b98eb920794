"""What every Python that the tests start does first: it looks for garbage more rarely.

Loading torch and its compiler makes a million objects that stay, and looking through them again and again takes a
quarter of the three seconds that it takes. Most of the tests' time goes into loading it.
"""

import gc

gc.set_threshold(100_000, 20, 100)
