"""What every Python that the tests start does first: it looks for garbage rarely, and not at all when it ends.

Loading torch and its compiler makes a million objects that stay. Looking through them again and again takes a quarter
of the three seconds of loading, and taking them apart at the end as long again as the half of it: two towers that train
take 11.0 s of CPU without the freezing and 8.8 s with it. Most of the tests' time goes into programs that start.
"""

import atexit
import gc
import sys


def _end() -> None:
    if "triton" not in sys.modules:  # which prints all that it finds alive at the end
        gc.freeze()


gc.set_threshold(100_000, 20, 100)
atexit.register(_end)
