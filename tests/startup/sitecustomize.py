"""Python runs this first in every process that tests start; tests/conftest.py puts the directory on PYTHONPATH.

Such a process imports torch, takes a few steps and ends; a third of its time went to the search for garbage among what
it had imported, while it did so and once more at its end. `tests/launch/test_run.py`, which looks at how processes end,
starts its own without this.
"""

import atexit
import gc

gc.set_threshold(50_000, 20, 20)
atexit.register(gc.freeze)  # what is registered first runs last
