"""Sandboxes: run what a model wrote, without the network and without reach of this machine.

    with open_sandbox(SandboxSettings(), Path("template")) as sandbox:
        ran = sandbox.run("python -m pytest -q", seconds=60)

Synchronous, for environments and rewards, which run in worker processes. Standard library only. `agent.py` is the
inside, `launch.py` starts it in each kind, `box.py` is the owner's side with the warm pool.
"""

from rollart.sandbox.box import Ran, Sandbox, Snapshot, open_sandbox
from rollart.sandbox.launch import SandboxSettings, choose, reason

__all__ = ["Ran", "Sandbox", "SandboxSettings", "Snapshot", "choose", "open_sandbox", "reason"]
