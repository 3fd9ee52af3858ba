"""Settings of every test. ROLLART_TEST_PRECISION=bfloat16 (or float32) runs the whole suite with that learner.precision
wherever a test does not choose one itself: what a user may set must work everywhere."""

import os

# Small models on shared cores: one thread a process, and threads that wait without spinning.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from helpers import PRECISION
from rollart.backends.torch.settings import LearnerSettings

if PRECISION:
    LearnerSettings.__init__.__kwdefaults__["precision"] = PRECISION
