import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rollart.core.errors import ConfigError
from rollart.observe.run_folder import RunFolder, atomic_write


def test_a_folder_with_a_run_is_refused_and_resume_is_named(tmp_path):
    RunFolder(tmp_path / "a").create({"seed": 1}).close()
    with pytest.raises(ConfigError, match="but it holds one: continue it with --resume"):
        RunFolder(tmp_path / "a").create({"seed": 2})
    with RunFolder(tmp_path / "a") as folder:
        assert folder.resume() == {"seed": 1}


def test_resume_without_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds no run"):
        RunFolder(tmp_path).resume()


def test_a_second_process_is_refused_by_pid_until_the_first_is_killed(tmp_path):
    code = (f"from rollart.observe.run_folder import RunFolder; f = RunFolder({str(tmp_path / 'a')!r}).create({{}}); "
            "print('locked', flush=True); import time; time.sleep(60)")
    other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "locked\n"
        folder = RunFolder(tmp_path / "a")
        assert folder.holder() == other.pid
        with pytest.raises(ConfigError, match=f"process {other.pid} runs in it"):
            folder.resume()
    finally:
        os.kill(other.pid, signal.SIGKILL)
        other.communicate()
    assert folder.holder() is None
    folder.resume()
    assert folder.holder() == os.getpid()
    folder.close()
    assert folder.holder() is None


def test_only_whole_checkpoints_count_and_the_newest_are_kept(tmp_path):
    folder = RunFolder(tmp_path)
    assert folder.newest_checkpoint() is None
    for version in (5, 10, 15):
        path = folder.begin_checkpoint(version)
        (path / "weights").write_bytes(b"w")
        folder.complete_checkpoint(path, keep=2)
    half = folder.begin_checkpoint(20)
    (half / "weights").write_bytes(b"w")
    assert folder.newest_checkpoint() == (15, folder.checkpoints / "000015")
    assert sorted(p.name for p in folder.checkpoints.iterdir()) == ["000010", "000015", "000020"]
    folder.complete_checkpoint(folder.begin_checkpoint(25), keep=1)
    assert sorted(p.name for p in folder.checkpoints.iterdir()) == ["000025"]


def test_a_checkpoint_begun_again_is_not_whole_until_it_is_completed_again(tmp_path):
    folder = RunFolder(tmp_path)
    folder.complete_checkpoint(folder.begin_checkpoint(3), keep=1)
    assert list(folder.begin_checkpoint(3).iterdir()) == []
    assert folder.newest_checkpoint() is None


def test_the_marker_is_the_last_thing_written_and_everything_is_synced_before_it(tmp_path, monkeypatch):
    folder, synced, real = RunFolder(tmp_path), [], os.fsync

    def fsync(handle):
        synced.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        assert folder.newest_checkpoint() is None or synced[-1] == "000007"
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    folder.database.write_text("ledger")
    path = folder.begin_checkpoint(7)
    (path / "weights").write_bytes(b"w")
    folder.complete_checkpoint(path, keep=1)
    assert synced == ["weights", "000007", "run.db", f".complete.{os.getpid()}.part", "000007"]


def test_an_atomic_write_leaves_no_part_behind(tmp_path):
    atomic_write(tmp_path / "x.json", "1")
    atomic_write(tmp_path / "x.json", b"22", durable=False)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("x.json", "22")]
