"""Settings of every test: one thread a process. ROLLART_TEST_PRECISION=bfloat16 (or float32) runs them all with that
learner.precision wherever a test does not choose one itself. In continuous integration (ROLLART_REQUIRE), a skip for
want of what the suite is for is a failure."""

import os
import signal

import pytest

from helpers import PRECISION
from rollart.backends.torch.settings import LearnerSettings

# Small models on shared cores: one thread a process, and threads that wait without spinning.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A shell without job control starts what it puts into the background with Ctrl-C ignored, and children inherit it.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)

if PRECISION:
    LearnerSettings.__init__.__kwdefaults__["precision"] = PRECISION

REQUIRED = os.environ.get("ROLLART_REQUIRE", "").split()
"""Words: a test that is skipped for a reason with one of them in it fails. `.` is in every reason."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    return required((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    return required((yield))


def required(report):
    if report.skipped and isinstance(report.longrepr, tuple):  # an expected failure has no such reason
        reason = report.longrepr[2]
        if any(word == "." or word in reason for word in REQUIRED):
            report.outcome, report.longrepr = "failed", f"{reason} (but ROLLART_REQUIRE={' '.join(REQUIRED)})"
    return report
