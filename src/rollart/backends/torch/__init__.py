"""Embedded model, engine, learner and weights on torch.

OpenMP's threads must not spin while they wait: engine, learner and environments share the cores, and spinning threads
made training up to ten times slower here (docs/log.md). OpenMP reads this once, when torch is first imported.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
