"""Looking at a run: nothing that looks can harm what writes."""

import asyncio
import http.client
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from fake_run import write_run
from histories import World

from helpers import command, environment
from rollart.build import FolderCheckpoints
from rollart.core.errors import RunError, TrainerLost
from rollart.observe.journal import Journal
from rollart.observe.ledger import Ledger
from rollart.observe.ledger_view import LedgerView
from rollart.observe.run_folder import RunFolder


class Saves:
    """A trainer that only saves."""

    async def save(self, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"weights")


def locks(path: Path) -> list[str]:
    """The POSIX locks of this process on a file (Linux), without their numbers among those of the whole machine."""
    return [line.partition(": ")[2] for line in Path("/proc/locks").read_text().splitlines()
            if f" {os.getpid()} " in line and f":{path.stat().st_ino} " in line]


@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="/proc/locks is Linux's")
def test_a_checkpoint_leaves_the_ledgers_locks_and_comes_after_a_durable_commit(tmp_path):
    folder = RunFolder(tmp_path / "run").create({})
    ledger, said = Ledger(folder.database), []
    world = World(1, Journal([ledger], clock=lambda: 0.0).emit)
    for _ in range(50):
        world.act()
    ledger.flush()
    files = [folder.database, folder.path / "run.db-shm"]
    before = [locks(file) for file in files]
    assert all(before)
    ledger._db.set_trace_callback(said.append)
    asyncio.run(FolderCheckpoints(folder, ledger, 2).save(3, {"version": 3}, Saves()))
    assert [locks(file) for file in files] == before
    durable = said[said.index("PRAGMA synchronous=FULL"):said.index("PRAGMA synchronous=NORMAL")]
    assert durable[-1] == "COMMIT"
    assert any("durable_at" in statement for statement in durable)
    assert folder.newest_checkpoint() == (3, folder.checkpoints / "000003")
    ledger.close()
    folder.close()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), TrainerLost("learner: No space left")])
def test_a_checkpoint_that_cannot_be_written_is_named(tmp_path, error):
    class Full:
        async def save(self, folder: Path) -> None:
            raise error

    folder = RunFolder(tmp_path / "run").create({})
    told = r"checkpoints/000003 was not written .*No space left.* --resume"
    with closing(Ledger(folder.database)) as ledger, pytest.raises(RunError, match=told):
        asyncio.run(FolderCheckpoints(folder, ledger, 2).save(3, {"version": 3}, Full()))
    assert folder.newest_checkpoint() is None
    folder.close()


WRITES = """
import os, signal, sys, time
from histories import World
from rollart.observe.journal import Journal
from rollart.observe.ledger import Ledger
ledger = Ledger(sys.argv[1])
world = World(1, Journal([ledger], clock=lambda: 0.0).emit)
for _ in range(500):
    world.act()
ledger.flush()
print(ledger.accounts.counts()["dispatched"], flush=True)
time.sleep(60)
"""
READS = """
import os, sys, urllib.parse  # as_uri imports it late, when this user may no longer read root's Python
from rollart.observe.ledger_view import LedgerView
if os.geteuid() == 0:
    os.setgroups([])
    os.setuid(65534)
with LedgerView(sys.argv[1]) as view:
    print(view.counts()["dispatched"])
"""


@pytest.mark.parametrize("alive", [True, False])
def test_another_user_and_a_folder_that_cannot_be_written_see_all_of_a_live_or_killed_run(alive):
    """As root the reader is another user; else the folder's rights alone keep it from writing."""
    folder = Path(tempfile.mkdtemp())  # not tmp_path, which nobody else may enter
    writer = subprocess.Popen([sys.executable, "-c", WRITES, folder / "run.db"], stdout=subprocess.PIPE, text=True,
                              cwd=Path(__file__).parent, env=environment())
    try:
        dispatched = int(writer.stdout.readline())
        if not alive:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
        assert (folder / "run.db-wal").stat().st_size > 10_000
        files = {f.name: f.stat().st_size for f in folder.iterdir()}
        folder.chmod(0o555)
        told = subprocess.run([sys.executable, "-c", READS, folder / "run.db"], capture_output=True, text=True,
                              env=environment())
        assert told.stdout.strip() == str(dispatched), told.stderr
        assert {f.name: f.stat().st_size for f in folder.iterdir()} == files
    finally:
        writer.kill()
        writer.communicate()
        folder.chmod(0o755)
        shutil.rmtree(folder)


def test_a_served_report_answers_many_at_once_and_only_who_asks_by_a_loopback_name(tmp_path):
    run = write_run(tmp_path / "run", steps=6).path
    before = sorted(f.name for f in run.iterdir())
    server = subprocess.Popen(command("report", run, "--serve", 0), stdout=subprocess.PIPE, text=True,
                              env=environment())
    try:
        port = int(server.stdout.readline().split(":")[2].split("/")[0])

        def get(host: str) -> int:
            client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            client.putrequest("GET", "/", skip_host=True)
            client.putheader("Host", host)
            client.endheaders()
            answer = client.getresponse()
            body = answer.read()
            client.close()
            assert answer.status != 200 or body.endswith(b"</html>\n")
            return answer.status

        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(get, ["127.0.0.1", f"localhost:{port}", f"[::1]:{port}"] * 10)) == [200] * 30
        assert [get(host) for host in ("evil.com", f"evil.com:{port}", "127.0.0.1.evil.com", "", "localhost@evil.com")
                ] == [403] * 5
        assert sorted(f.name for f in run.iterdir()) == before
    finally:
        server.terminate()
        server.communicate(timeout=60)


def test_a_served_report_tells_what_cannot_be_read_and_bears_clients_that_go_away(tmp_path):
    run = write_run(tmp_path / "run", steps=2).path
    whole = (run / "metrics.jsonl").read_bytes()
    server = subprocess.Popen(command("report", run, "--serve", 0), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              text=True, env=environment())
    try:
        port = int(server.stdout.readline().split(":")[2].split("/")[0])

        def get() -> tuple[int, bytes]:
            client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            client.request("GET", "/")
            answer = client.getresponse()
            body = answer.read()
            client.close()
            return answer.status, body

        for _ in range(3):  # gone, by a reset, before the answer
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.send(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        for name in ("metrics.jsonl", "config.json"):
            before = (run / name).read_bytes()
            (run / name).write_bytes(b"{\n")
            status, body = get()
            assert (status, body.startswith(b"the run cannot be read now: ")) == (503, True)
            assert name.encode() in body
            (run / name).write_bytes(before)
        assert get()[0] == 200
        assert (run / "metrics.jsonl").read_bytes() == whole
    finally:
        server.terminate()
        _, errors = server.communicate(timeout=60)
    assert errors == ""


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "status.json"])
@pytest.mark.parametrize("content", [b"{\n", b"\xff\xfe\xfd\n", b"3\n"])
def test_a_damaged_file_of_a_run_is_one_line_and_exit_code_2(tmp_path, name, content):
    run = write_run(tmp_path / "run", steps=2).path
    (run / name).write_bytes(content)
    told = subprocess.run(command("status", run), capture_output=True, text=True, env=environment())
    assert (told.returncode, told.stderr.count("\n")) == (2, 1), told.stderr
    assert name in told.stderr


def test_a_copy_of_an_ended_or_killed_run_is_the_run(tmp_path):
    run = write_run(tmp_path / "run", steps=3, ended=False)
    shutil.copytree(run.path, tmp_path / "copy")
    with LedgerView(run.database) as here, LedgerView(tmp_path / "copy" / "run.db") as there:
        assert here.by_domain() == there.by_domain() != {}
