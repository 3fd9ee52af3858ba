import os

# Small models on shared cores: one thread a process, and threads that wait without spinning.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
