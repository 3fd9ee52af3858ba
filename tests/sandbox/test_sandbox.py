"""What a sandbox keeps in, and what is left of it: nothing."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import rollart
from rollart.core.errors import ConfigError, SandboxFailed
from rollart.sandbox import SandboxSettings, box, choose, launch, open_sandbox, reason
from rollart.sandbox.box import close_warm

pytestmark = pytest.mark.skipif(bool(reason("bubblewrap")), reason=f"bubblewrap: {reason('bubblewrap')}")
SMALL = SandboxSettings(kind="bubblewrap", seconds=10, memory_mb=128, pids=16, disk_mb=8, cpu_seconds=2, warm=0)


@pytest.fixture
def sandbox():
    with open_sandbox(SMALL) as opened:
        yield opened


def python(sandbox, code, **options):
    return sandbox.run(["python3", "-"], stdin=code, **options)


def processes(text):
    """Ids of this machine's processes whose command line has the text."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text in path.read_bytes().replace(b"\0", b" ").decode(errors="replace"):
                found.append(int(path.parent.name))
        except OSError:
            pass
    return found


def until(true, seconds=20.0):
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.02)
    return true()


def test_a_command_gets_its_input_folder_and_environment_and_nothing_of_ours(sandbox, monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "hidden")
    ran = sandbox.run("mkdir d; cat; echo oops >&2; exit 3", stdin="given")
    assert (ran.stdout, ran.stderr, ran.code, ran.timed_out, ran.truncated) == ("given", "oops\n", 3, False, False)
    assert sandbox.run("pwd; echo $A", cwd="d", env={"A": "b"}).stdout == "/box/d\nb\n"
    assert "SECRET" not in sandbox.run("env; cat /proc/*/environ").stdout
    assert sandbox.run(["no-such-program"]).code == 127
    assert sandbox.run("exit", cwd="nowhere").code == 127
    imported = python(sandbox, "import sys, pydantic; print(sys.prefix)")
    assert imported.stdout.strip() == sys.prefix


def test_files_and_snapshots_give_back_what_was_put_in(sandbox):
    data = bytes(range(256)) * 1000
    sandbox.write("a/b c/-d", data)
    assert sandbox.read("a/b c/-d") == data
    kept = sandbox.snapshot()
    sandbox.run("rm -r a; echo new > -n; mkdir -m 000 locked; ln -s /etc link; printf x > 'new\nline'; chmod 0 .")
    sandbox.restore(kept)
    assert sandbox.run("find . -type f -o -type l").stdout == "./a/b c/-d\n"
    with open_sandbox(SMALL) as other:
        other.restore(kept)
        assert other.read("a/b c/-d") == data
    with pytest.raises(FileNotFoundError):
        sandbox.read("nowhere")
    for path in ("a", "/dev/zero", "/proc/1/environ"):
        with pytest.raises(OSError, match="in the sandbox"):
            sandbox.read(path)
    with pytest.raises(OSError, match="in the sandbox"):
        sandbox.write("big", bytes(9_000_000))


def test_a_template_is_copied_and_never_changed(tmp_path, monkeypatch):
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "x.py").write_text("x = 1\n")
    for _ in range(2):
        with open_sandbox(SandboxSettings(warm=1), tmp_path) as sandbox:
            assert sandbox.run("cat pkg/x.py; echo 'x = 2' > pkg/x.py; rm -rf /template/*; cat pkg/x.py"
                               ).stdout == "x = 1\nx = 2\n"
    assert (tmp_path / "pkg" / "x.py").read_text() == "x = 1\n"
    with pytest.raises(SandboxFailed, match="nowhere is no folder"):
        open_sandbox(SMALL, tmp_path / "nowhere")
    monkeypatch.chdir(tmp_path)
    with open_sandbox(SMALL, Path("pkg")) as sandbox:
        assert sandbox.read("x.py") == b"x = 1\n"


@pytest.mark.parametrize(("command", "more"), [
    ([], {}), ([3], {}), ("true", {"env": {"A": 3}}), ("true", {"seconds": float("nan")}),
    ("true", {"seconds": float("inf")})])
def test_a_wrong_argument_is_the_callers_error_and_the_sandbox_goes_on(sandbox, command, more):
    with pytest.raises(ValueError, match=r"a command is|needs seconds > 0"):
        sandbox.run(command, **more)
    assert sandbox.run("echo on").stdout == "on\n"


def test_a_closed_sandbox_says_so():
    sandbox = open_sandbox(SMALL)
    sandbox.close()
    with pytest.raises(SandboxFailed, match="it is closed"):
        sandbox.run("true")


ESCAPES = {
    "network": ("import socket; socket.create_connection(('{host}', {port}), 2)", "unreachable|refused|Errno"),
    "name service": ("import socket; socket.getaddrinfo('example.org', 443)", "resolution|known"),
    "writing to the system": ("open('/usr/bin/mine', 'w')", "Read-only|Permission"),
    "writing to the interpreter": ("import sys; open(sys.prefix + '/mine', 'w')", "Read-only|Permission"),
    "writing to the root": ("open('/mine', 'w')", "Read-only|Permission"),
    "the host's home": ("import os; print(os.listdir({home!r})); raise SystemExit(os.path.exists({secret!r}))", "$"),
    "the host's files": ("open({secret!r})", "No such file|Permission"),
    "the users of the host": ("open('/etc/passwd')", "No such file"),
    "the host's processes": ("import os; os.kill({pid}, 0)", "No such process"),
    "the agent's memory": ("open('/proc/1/mem', 'rb')", "Permission"),
    "the agent's socket": ("open('/proc/1/fd/1', 'w')", "Permission|No such"),
    "killing the agent": ("import os; os.kill(1, 9); os.stat('/proc/1'); raise SystemExit(1)", "$|not perm"),
    "mounting": ("import ctypes; c = ctypes.CDLL(None, use_errno=True); r = c.mount(b'x', b'/box', b'tmpfs', 0, 0);"
                 "raise OSError(ctypes.get_errno(), 'mount') if r else None", "mount"),
    "a namespace of users": ("import subprocess, sys; sys.exit(subprocess.run(['unshare', '-Ur', 'true']).returncode)",
                             "not permitted"),
    "memory of no process": ("import os; os.memfd_create('x')", "not permitted"),
    "the kernel's keys": ("import ctypes; c = ctypes.CDLL(None, use_errno=True); r = c.syscall(248, b'user', b'a', b'',"
                          "1, -3); raise OSError(ctypes.get_errno(), 'key') if r < 0 else None", "key"),
    "becoming root": ("import os; os.setuid(0)", "not permitted|Invalid"),
    "a setuid program": ("import subprocess, sys; sys.exit(subprocess.run(['su', '-c', 'true'], stdin=-3).returncode)",
                         "su:|No such"),
    "kernel settings": ("open('/proc/sys/kernel/core_pattern', 'w')", "Read-only|Permission"),
}


@pytest.mark.parametrize("what", ESCAPES)
def test_an_escape_is_refused(what, sandbox, tmp_path):
    code, says = ESCAPES[what]
    secret = tmp_path / "secret"
    secret.write_text("hidden")
    with socket.create_server(("0.0.0.0", 0)) as server:
        names = {"host": "127.0.0.1", "port": server.getsockname()[1], "home": str(Path.home()), "secret": str(secret),
                 "pid": os.getpid()}
        code = re.sub(r"\{(\w+)(!r)?\}", lambda m: repr(names[m[1]]) if m[2] else str(names[m[1]]), code)
        ran = python(sandbox, code)
    if what != "the host's home":
        assert ran.code != 0, ran
        assert re.search(says, ran.stderr), ran
    else:
        assert ran.code != 1 or "Error" in ran.stderr, ran
    assert "hidden" not in ran.stdout + ran.stderr
    assert sandbox.run("echo alive").stdout == "alive\n"


BOMBS = {
    "fork bomb": ("import os\nwhile True:\n try: os.fork()\n except OSError: pass", {"seconds": 2}, "timed_out"),
    "thread bomb": ("import threading, time\nfor _ in range(99): "
                    "threading.Thread(target=time.sleep, args=(9,), daemon=True).start()", {}, "start new thread"),
    "memory bomb": ("x = []\nwhile True: x.append(bytearray(10**6))", {}, "MemoryError"),
    "memory bomb of many": ("import os, time\nfor _ in range(3): os.fork()\nx = bytearray(60 * 10**6); time.sleep(9)",
                            {}, "above its limit of memory"),
    "memory in files": ("open('/dev/shm/x', 'wb').write(bytes(10**8))", {}, "too large|No space|MemoryError"),
    "big file": ("f = open('x', 'wb')\nfor _ in range(20): f.write(bytes(10**6)); f.flush()", {}, "too large"),
    "many files": ("for i in range(20): open(f'{i}', 'wb').write(bytes(10**6))", {}, "No space"),
    "endless output": ("import os\nwhile True: os.write(1, b'x' * 65536)", {"seconds": 1}, "timed_out"),
    "cpu": ("while True: pass", {"seconds": 9}, "code -24|code -9"),
    "ignores signals": ("import signal, time\nfor s in (1, 2, 15): signal.signal(s, signal.SIG_IGN)\ntime.sleep(99)",
                        {"seconds": 0.3}, "timed_out"),
}


@pytest.mark.parametrize("what", BOMBS)
def test_a_bomb_ends_within_its_limits_and_the_sandbox_goes_on(what, sandbox):
    code, options, says = BOMBS[what]
    started = time.monotonic()
    ran = python(sandbox, code, **options)
    assert time.monotonic() - started < 40
    assert ran.code != 0
    assert re.search(says, f"{ran.stderr} code {ran.code} {'timed_out' if ran.timed_out else ''}"), ran
    assert len(ran.stdout) <= SMALL.output_bytes + 100
    assert ran.truncated == (what == "endless output")
    assert sandbox.run("rm -f /dev/shm/* *; ps -e | wc -l").stdout.strip() in ("4", "5")  # ps, its shell, wc, the agent


def test_of_much_output_the_first_and_the_last_is_kept(sandbox):
    ran = python(sandbox, "print('first'); print('x' * 300_000); print('last')")
    assert ran.stdout.startswith("first\n")
    assert ran.stdout.endswith("last\n")
    assert "bytes left out" in ran.stdout


def test_what_a_command_leaves_running_is_gone_before_the_next(sandbox):
    mark = f"31.{os.getpid()}7"
    ran = sandbox.run(f"setsid sleep {mark} >/dev/null 2>&1 & nohup sleep {mark} & echo started")
    assert ran.stdout == "started\n"
    assert ran.seconds < 30
    assert processes(f"sleep {mark}") == []


@pytest.mark.parametrize("link", ["{secret}", "/proc/1/environ", "/dev/zero", "/etc/shadow"])
def test_links_lead_nowhere_outside(link, sandbox, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("hidden")
    sandbox.run(["ln", "-s", link.format(secret=secret), "link"])
    sandbox.run(["ln", "-s", str(tmp_path), "folder"])
    with pytest.raises(OSError, match="in the sandbox"):
        sandbox.read("link")
    with pytest.raises(OSError, match="in the sandbox"):
        sandbox.read("folder/secret")
    sandbox.write("link", b"mine")
    assert sandbox.read("link") == b"mine"
    with pytest.raises(OSError, match="in the sandbox"):
        sandbox.write("folder/secret", b"mine")
    assert secret.read_text() == "hidden"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["secret"]


def test_a_pipe_in_place_of_a_file_is_not_waited_for(sandbox):
    sandbox.run("mkfifo pipe")
    with pytest.raises(OSError, match="no file"):
        sandbox.read("pipe")


def test_an_answer_that_is_too_large_or_none_ends_the_sandbox(monkeypatch):
    for answer in (b"\xff" * 12, b""):
        with open_sandbox(SMALL) as sandbox:
            monkeypatch.setattr(sandbox, "_answers", __import__("io").BytesIO(answer))
            with pytest.raises(SandboxFailed, match=r"answer of|has ended"):
                sandbox.run("true")
            with pytest.raises(SandboxFailed):
                sandbox.run("true")


def test_a_sandbox_ends_at_the_end_of_its_life():
    with open_sandbox(SandboxSettings(life_seconds=2.0, warm=0)) as sandbox:
        assert sandbox.run("sleep 60").timed_out
        time.sleep(0.5)
        with pytest.raises(SandboxFailed, match=r"it has ended|Broken pipe|reset"):
            sandbox.run("true")


def test_one_that_waited_for_half_its_life_is_not_given_out():
    settings = SandboxSettings(life_seconds=4.0)
    open_sandbox(settings).close()
    time.sleep(2.2)
    with open_sandbox(settings) as sandbox:
        time.sleep(2.0)
        assert sandbox.run("echo alive").stdout == "alive\n"
    close_warm()


def test_several_threads_open_and_close_and_nothing_is_lost():
    def play(i):
        with open_sandbox(SandboxSettings(warm=2)) as sandbox:
            return sandbox.run(f"echo {i}").stdout

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(play, range(12))) == [f"{i}\n" for i in range(12)]
    close_warm()
    assert not box._open


@pytest.mark.parametrize("fork", [False, True])
def test_nothing_outlives_its_owner_also_when_that_is_killed(fork):
    mark = f"33.{os.getpid()}{int(fork)}"
    code = ("import os, time\nfrom rollart.sandbox import *\ns = open_sandbox(SandboxSettings(warm=2))\ns.close()\n"
            f"s = open_sandbox(SandboxSettings(warm=2))\nif {fork} and os.fork() == 0: time.sleep(60)\n"
            f"print(os.getpid(), flush=True)\ns.run('sl' 'eep {mark} & sl' 'eep {mark}', seconds=60)")
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True,
                             env={**os.environ, "PYTHONPATH": str(Path(rollart.__file__).parents[1])})
    try:
        name = f"rollart-sandbox-{int(owner.stdout.readline())}-"
        assert until(lambda: len(processes(f"sleep {mark}")) >= 2)
        assert len(processes(name)) >= 2
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        assert until(lambda: not processes(f"sleep {mark}"))
        assert until(lambda: not processes(name))
    finally:
        os.killpg(owner.pid, signal.SIGKILL) if fork or owner.poll() is None else None
        owner.stdout.close()


def test_many_cycles_leave_no_process_mount_folder_or_descriptor():
    ours = f"rollart-sandbox-{os.getpid()}-"

    def left():
        close_warm()
        mounts, folders = Path("/proc/self/mounts").read_text(), Path("/tmp").glob(f"{ours}*")
        return len(processes(ours)), mounts, list(folders), len(os.listdir("/proc/self/fd"))

    with open_sandbox(SandboxSettings()):
        pass
    before = left()
    for i in range(25):
        with open_sandbox(SandboxSettings(warm=i % 3)) as sandbox:
            assert sandbox.run("sleep 60 & echo x > x").code == 0
    assert left() == before
    assert not box._open


def test_as_many_templates_as_one_likes_keep_few_warm(tmp_path):
    for i in range(box._MANY + 3):
        (tmp_path / str(i)).mkdir()
        open_sandbox(SandboxSettings(), tmp_path / str(i)).close()
    assert sum(map(len, box._warm.values())) <= box._MANY
    close_warm()


def test_a_user_without_rights_gets_the_same_sandbox(tmp_path):
    if os.geteuid() != 0 or not os.path.exists("/usr/bin/python3"):
        pytest.skip("only root can become another user")
    code = ("from rollart.sandbox import *\nwith open_sandbox(SandboxSettings(pids=16, warm=0)) as s:\n"
            " print(s.run('id -u; ls /; cat /etc/passwd; unshare -Ur true; ' + "
            "'python3 -c \"import os\\nwhile 1: os.fork()\"', seconds=5))")
    source = tmp_path.parent / "rollart-source"
    subprocess.run(["cp", "-r", str(Path(rollart.__file__).parents[1]), str(source)], check=True)
    subprocess.run(["chmod", "-R", "a+rX", str(source), str(tmp_path.parent), str(tmp_path.parent.parent)], check=True)
    other = ["setpriv", "--reuid", "54321", "--regid", "54321", "--clear-groups", "/usr/bin/python3", "-c", code]
    done = subprocess.run(other, capture_output=True, text=True, cwd="/",
                          env={"PYTHONPATH": str(source), "PATH": os.environ["PATH"]})
    if "does not work here" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert "Ran(stdout='1000\\n" in done.stdout, done
    assert "No such file" in done.stdout
    assert "unshare failed: Operation not permitted" in done.stdout
    assert "BlockingIOError" in done.stdout


def test_where_nothing_works_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setattr(launch, "reason", lambda kind: "" if kind == "trust" else "it is not there")
    with pytest.raises(ConfigError, match=r"needs a sandbox.*apt-get install bubblewrap") as refused:
        choose("auto")
    assert "\n" not in str(refused.value)
    with pytest.raises(ConfigError, match="podman does not work here"):
        choose("podman")
    assert choose("trust") == "trust"


def test_trust_says_so_runs_here_and_removes_what_the_dead_left(capfd):
    gone = subprocess.Popen(["true"])
    gone.wait()
    left = Path(f"/tmp/rollart-sandbox-{gone.pid}-1-x")
    left.mkdir(exist_ok=True)
    launch.reason.cache_clear()
    with open_sandbox(SandboxSettings(kind="trust", seconds=5, warm=0)) as sandbox:
        sandbox.write("a.txt", b"hi")
        assert sandbox.run("cat a.txt; sleep 60 & pwd").stdout == f"hi{sandbox.work}\n"
        assert Path(sandbox.work, "a.txt").read_bytes() == b"hi"
        assert sandbox.run("sleep 60", seconds=0.2).timed_out
    assert not Path(sandbox.work).exists()
    assert not left.exists()
    assert capfd.readouterr().err.count("without isolation") == 1


@pytest.mark.parametrize(("values", "says"), [
    ({"kind": "chroot"}, "one of auto, bubblewrap"), ({"memory_mb": 0}, "memory_mb must be above 0"),
    ({"warm": 99}, "warm must lie between 0 and 16")])
def test_settings_out_of_range_are_refused(values, says):
    with pytest.raises(ValueError, match=says):
        SandboxSettings(**values)
