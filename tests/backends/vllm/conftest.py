"""Folders of tiny models, and one event loop for all tests of a session."""

import asyncio
import os

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Two sets of weights of each kind: version 0 and version 1."""
    from tiny_models import KINDS, make_folder

    base = tmp_path_factory.mktemp("models")
    return {kind: [make_folder(kind, base / f"{kind}{seed}", seed) for seed in (0, 1)] for kind in KINDS}


@pytest.fixture(scope="session")
def loop():
    """One event loop for the session, so that an engine serves several tests."""
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()
