import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rollart.core.errors import ConfigError
from rollart.observe.ledger import Ledger
from rollart.observe.run_folder import RunFolder, atomic_write, read_object


def test_a_folder_with_a_run_is_refused_and_resume_is_named(tmp_path):
    RunFolder(tmp_path / "a").create({"seed": 1}).close()
    with pytest.raises(ConfigError, match="but it holds one: continue it with --resume"):
        RunFolder(tmp_path / "a").create({"seed": 2})
    with RunFolder(tmp_path / "a") as folder:
        assert folder.resume() == {"seed": 1}


def test_resume_without_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds no run"):
        RunFolder(tmp_path).resume()


def test_a_folder_without_a_run_is_told_with_the_newest_run_in_it_or_beside_it(tmp_path):
    runs = tmp_path / "runs"
    for age, name in ((20, "old"), (10, "new")):
        Ledger(RunFolder(runs / name).create({}).database).close()
        os.utime(runs / name / "run.db", (time.time() - age,) * 2)
    for path in (runs, runs / "nwe"):
        with pytest.raises(ConfigError, match=f"such as {runs / 'new'}, or start"):
            RunFolder(path).read_config()


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
    path = folder.begin_checkpoint(7)
    (path / "weights").write_bytes(b"w")
    folder.complete_checkpoint(path, keep=1)
    assert synced == ["weights", "000007", f".complete.{os.getpid()}.{threading.get_native_id()}.part", "000007"]


def test_an_atomic_write_leaves_no_part_behind(tmp_path):
    atomic_write(tmp_path / "x.json", "1")
    atomic_write(tmp_path / "x.json", b"22", durable=False)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("x.json", "22")]


def test_a_write_that_fails_names_the_file_and_leaves_nothing(tmp_path):
    code = ("import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
            "from pathlib import Path; from rollart.observe.run_folder import atomic_write\n"
            f"try: atomic_write(Path({str(tmp_path)!r}) / 'status.json', b'x' * 5000)\n"
            "except OSError as error: print(error)")
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert told.strip() == f"[Errno 27] File too large: '{tmp_path / 'status.json'}'"
    assert list(tmp_path.iterdir()) == []


def test_threads_that_write_one_file_at_once_do_not_meet(tmp_path):
    failed = []

    def write(n):
        try:
            for _ in range(200):
                atomic_write(tmp_path / "report.html", str(n) * 1000, durable=False)
        except OSError as error:
            failed.append(error)

    threads = [threading.Thread(target=write, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert [f.name for f in tmp_path.iterdir()] == ["report.html"]


def test_what_a_killed_process_left_half_written_is_removed_on_resume(tmp_path):
    RunFolder(tmp_path).create({"seed": 1}).close()
    (tmp_path / ".status.json.99.99.part").write_text("{")
    with RunFolder(tmp_path) as folder:
        folder.resume()
        assert sorted(f.name for f in tmp_path.iterdir()) == ["checkpoints", "config.json", "lock"]


@pytest.mark.parametrize("content", [b"", b"{", b'{"a": "\xff"}', b"[" * 100_000, b"[1]"])
def test_a_file_that_is_no_json_object_is_one_line_that_names_it(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    for read in (RunFolder(tmp_path).read_config, RunFolder(tmp_path).resume):
        with pytest.raises(ConfigError, match=r"^[^\n]*config.json must hold [^\n]*$"):
            read()
    with pytest.raises(FileNotFoundError):
        read_object(tmp_path / "other.json")


@pytest.mark.parametrize(("damage", "told"), [
    (lambda file: file.write_bytes(b""), "has 0 bytes of 3"), (lambda file: file.unlink(), "is missing"),
    (lambda file: file.write_bytes(b"wxw"), "has other bytes than were written")])
def test_a_damaged_checkpoint_is_told_with_the_older_one_to_go_on_from(tmp_path, damage, told):
    folder = RunFolder(tmp_path)
    for version in (5, 10):
        path = folder.begin_checkpoint(version)
        (path / "adapter").mkdir()
        (path / "adapter" / "weights").write_bytes(b"www")
        folder.complete_checkpoint(path, keep=2)
        folder.check_checkpoint(version)
    damage(folder.checkpoints / "000010" / "adapter" / "weights")
    with pytest.raises(ConfigError, match=rf"000010 is damaged \(adapter/weights {told}\): go on from the older whole "
                                          "one, 000005, by removing the folder 000010"):
        folder.check_checkpoint(10)
    damage(folder.checkpoints / "000005" / "adapter" / "weights")
    with pytest.raises(ConfigError, match="there is no older one"):
        folder.check_checkpoint(5)


def test_a_checkpoint_of_before_there_were_sums_is_taken(tmp_path):
    folder = RunFolder(tmp_path)
    (folder.begin_checkpoint(5) / "complete").write_text("")
    folder.check_checkpoint(5)


@pytest.mark.parametrize("made", ["", "empty", "link", "inside"])
def test_what_is_discarded_is_what_was_made_and_no_folder_of_before(made, tmp_path, monkeypatch):
    path = tmp_path / "run"
    if made:
        (tmp_path / "real").mkdir()
        path = tmp_path / "real"
    if made == "link":
        path = tmp_path / "link"
        path.symlink_to(tmp_path / "real")
    if made == "inside":
        monkeypatch.chdir(tmp_path / "real")
        path = Path()
    with RunFolder(path).create({}) as folder:
        folder.discard()
    assert path.exists() == bool(made)
    if made:
        assert not any(path.iterdir())


def test_what_others_put_beside_the_checkpoints_is_neither_taken_for_one_nor_removed(tmp_path):
    folder = RunFolder(tmp_path)
    for version in (1, 2, 3):
        (folder.begin_checkpoint(version) / "weights").write_bytes(b"w")
        folder.complete_checkpoint(folder.checkpoint(version), keep=3)
    moved = tmp_path / "large" / "000002"
    moved.parent.mkdir()
    folder.checkpoint(2).rename(moved)
    folder.checkpoint(2).symlink_to(moved)
    for copy in ("1", "99", "0000001", "٣"):
        shutil.copytree(folder.checkpoint(1), folder.checkpoints / copy)
    (folder.checkpoints / "000000").write_text("mine")
    assert folder.newest_checkpoint() == (3, folder.checkpoint(3))
    (folder.begin_checkpoint(4) / "weights").write_bytes(b"w")
    folder.complete_checkpoint(folder.checkpoint(4), keep=1)
    assert sorted(path.name for path in folder.checkpoints.iterdir()) == ["000000", "0000001", "000004", "1", "99", "٣"]
    assert sorted(path.name for path in moved.iterdir()) == ["complete", "weights"]


def test_a_name_that_no_checkpoint_could_be_written_under_is_refused_at_once(tmp_path):
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    with pytest.raises(ConfigError, match="needs a name in UTF-8"):
        RunFolder(path).create({})
    assert not path.exists()
