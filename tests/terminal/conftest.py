from contextlib import suppress

import pytest
from screens import OPEN


@pytest.fixture(autouse=True)
def closed():
    """The terminals of a test are closed with it."""
    yield
    while OPEN:
        with suppress(OSError):  # one that the test has closed itself
            OPEN.pop().close(force=True)
