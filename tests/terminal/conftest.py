import pytest
from screens import OPEN


@pytest.fixture(autouse=True)
def closed():
    """The terminals of a test are closed with it."""
    yield
    while OPEN:
        OPEN.pop().close(force=True)
