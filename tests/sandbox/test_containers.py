"""The same sandbox in a container: with podman or docker, where it works and has the image."""

import os
import subprocess

import pytest

from rollart.sandbox import SandboxSettings, launch, open_sandbox, reason
from rollart.sandbox.box import close_warm

IMAGE = SandboxSettings().image


def lacks(kind):
    """Why the kind cannot be tested here."""
    if why := reason(kind):
        return why
    images = subprocess.run([kind, "image", "inspect", IMAGE], capture_output=True)
    return "" if images.returncode == 0 else f"image {IMAGE} is not here"


@pytest.mark.parametrize("kind", ["podman", "docker"])
def test_a_container_is_a_sandbox_like_any_other(kind, tmp_path):
    if why := lacks(kind):
        pytest.skip(f"{kind}: {why}")
    tmp_path.chmod(0o755)  # the container has a user of its own
    (tmp_path / "x").write_text("of the template")
    settings = SandboxSettings(kind=kind, warm=1, pids=32, memory_mb=256, cpu_seconds=5)
    for _ in range(2):
        with open_sandbox(settings, tmp_path) as sandbox:
            assert sandbox.run("cat x; sleep 99 & echo").stdout == "of the template\n"
            sandbox.write("a/b", b"hi")
            kept = sandbox.snapshot()
            sandbox.run("rm -r a x; mkdir -m 000 locked")
            sandbox.restore(kept)
            assert sandbox.read("a/b") == b"hi"
            connect = "import socket; socket.create_connection(('1.1.1.1', 53), 2)"
            assert "unreachable" in sandbox.run(["python3", "-c", connect]).stderr
            assert sandbox.run(["python3", "-c", "x = bytearray(10**10)"]).code != 0
            assert sandbox.run(["python3", "-c", "import os\nwhile True: os.fork()"], seconds=2).code != 0
            assert sandbox.run("echo x > /usr/x").code != 0
            assert sandbox.run("id -u").stdout == "1000\n"
    close_warm()
    names = subprocess.run([kind, "ps", "-a", "--format", "{{.Names}}"], capture_output=True, text=True).stdout
    assert f"rollart-sandbox-{os.getpid()}-" not in names


def test_a_container_is_started_without_network_rights_or_a_writable_system(tmp_path):
    command = launch._container("docker", SandboxSettings(memory_mb=99, pids=7, read_only=("/opt/x",)), tmp_path, "x")
    line = " ".join(command)
    for part in ("--network none", "--read-only", "--cap-drop ALL", "no-new-privileges", "--name x",
                 "--memory 99m", "--pids-limit 8", "--user 1000:1000", "/opt/x:/opt/x:ro", f" {tmp_path}:/template:ro"):
        assert part in line
    assert command[-1] == IMAGE
