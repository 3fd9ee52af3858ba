"""The inside of a sandbox: its first process, which runs one command after the other for the owner of its socket.

Keeps true: whatever a command started is gone before its answer is sent; past its deadline, memory or processes it is
killed with all it started; no more output than its limit is held. It ends with the socket (the owner closed it, or
died) and at the end of its life. Standard library only. Waits for the next request, and for the command.

    request  lengths (>II) of a JSON header {command, seconds, output, env, cwd} and the input; both
    answer   lengths (>III) of a JSON header {code, timed_out, truncated, seconds}, output and errors; all three
"""

import ctypes
import json
import os
import resource
import select
import signal
import struct
import subprocess
import sys
from time import monotonic

TICK = 0.05  # seconds between two looks at the memory and the processes in use


def prepare(spec):
    """Fill the work folder and become the sandbox's own user, for good, and out of reach of its commands."""
    if entries := [os.path.join(spec["template"], name) for name in os.listdir(spec["template"] or spec["work"])]:
        subprocess.run(["cp", "-a", "--", *entries, spec["work"]], check=True, stdout=subprocess.DEVNULL)
    if spec["uid"]:
        subprocess.run(["chown", "-hR", f"{spec['uid']}:{spec['uid']}", spec["work"]], check=True)
        os.chown(spec["home"], spec["uid"], spec["uid"])  # a Python of this machine may lie under it
        os.setgroups([])
        os.setresgid(*[spec["uid"]] * 3)
        os.setresuid(*[spec["uid"]] * 3)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(4, 0)  # PR_SET_DUMPABLE: no command may trace this process or use its descriptors


def limit(spec):
    """In the command's process, before it is the command. Where others share its user, their processes would count."""
    wanted = {resource.RLIMIT_AS: spec["memory"], resource.RLIMIT_CPU: spec["cpu"], resource.RLIMIT_FSIZE: spec["disk"],
              resource.RLIMIT_CORE: 0, resource.RLIMIT_NOFILE: 512}
    for kind, value in {**wanted, **({resource.RLIMIT_NPROC: spec["pids"]} if spec["own_user"] else {})}.items():
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard),) * 2)


def above(spec):
    """Which limit all processes together are above; empty if none. A single one is held by `limit`."""
    pages = count = 0
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            try:
                with open(f"/proc/{name}/statm") as file:
                    pages, count = pages + int(file.read().split()[1]), count + 1
            except (OSError, IndexError):
                pass  # it has ended
    return "memory" if pages * resource.getpagesize() > spec["memory"] else "processes" if count > spec["pids"] else ""


def run(request, given, spec, ends):
    """One command to its end; see the module's docstring for the answer."""
    started, command = monotonic(), request["command"]
    if isinstance(command, str):
        command = ["/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh", "-c", command]
    try:
        if os.stat(spec["work"]).st_uid == os.getuid():
            os.chmod(spec["work"], 0o755)  # whatever a command made of it
        process = subprocess.Popen(command, cwd=os.path.join(spec["work"], request["cwd"]), stdin=subprocess.PIPE,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=request["env"], bufsize=0,
                                   preexec_fn=lambda: limit(spec), start_new_session=True)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return {"code": 127, "timed_out": False, "truncated": False, "seconds": 0.0}, b"", str(error).encode()
    pipes = {process.stdout: bytearray(), process.stderr: bytearray()}
    given = memoryview(given)  # sliced without a copy
    lost, half, live = dict.fromkeys(pipes, 0), request["output"] // 2, set(pipes)

    def drain(pipe):
        data = pipe.read(1 << 16)  # None: nothing now; empty: its end
        if data == b"":
            live.discard(pipe)
        pipes[pipe] += data or b""
        over = max(0, len(pipes[pipe]) - 2 * half)
        del pipes[pipe][half:half + over]
        lost[pipe] += over
        return data

    for pipe in (*pipes, process.stdin):
        os.set_blocking(pipe.fileno(), False)
    ending = [os.pidfd_open(process.pid)] if hasattr(os, "pidfd_open") else []
    deadline, looked, why, late = min(started + request["seconds"], ends), started, "", False
    while process.poll() is None and not why and not late:
        feeding = [] if process.stdin.closed else [process.stdin]
        ready, room, _ = select.select([0, *ending, *live], feeding, [], TICK if ending else TICK / 10)
        if 0 in ready:
            os._exit(0)  # the owner is gone
        for pipe in live.intersection(ready):
            drain(pipe)
        try:
            given = given[process.stdin.write(given[:1 << 16]) or 0:] if room and given else given
        except OSError:
            given = b""
        if not given:
            process.stdin.close()
        now = monotonic()
        late = now >= deadline
        if spec["isolated"] and now - looked >= TICK:
            looked, why = now, above(spec)
    finish(process, spec["isolated"])
    for pipe, kept in pipes.items():
        while pipe in live and drain(pipe):
            pass
        pipe.close()
        kept[half:0] = b"\n... %d bytes left out ...\n" % lost[pipe] if lost[pipe] else b""
    process.stdin.close()
    for fd in ending:
        os.close(fd)
    out, err = pipes.values()
    err += f"\n[killed: above its limit of {why}]\n".encode() if why else b""
    return {"code": process.returncode, "timed_out": late, "truncated": any(lost.values()),
            "seconds": monotonic() - started}, out, err


def finish(process, isolated):
    """Kill whatever is left of a command and wait until it is gone."""
    try:
        os.kill(-1 if isolated else -process.pid, signal.SIGKILL)  # -1: all in this namespace but its first process
    except (ProcessLookupError, PermissionError):
        pass
    process.wait()
    while isolated:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            break


def take(count):
    """Exactly that many bytes of the owner's; where there are no more, this process ends."""
    data = sys.stdin.buffer.read(count)
    return data if len(data) == count else os._exit(0)


def main():
    spec = json.loads(sys.argv[1])
    if spec["isolated"] and os.getpid() != 1:
        raise SystemExit("not the first process of its namespace")
    ends = monotonic() + spec["life"]
    prepare(spec)
    sys.stdout.buffer.write(b"ready")
    sys.stdout.buffer.flush()
    while select.select([0], [], [], max(0.0, ends - monotonic()))[0]:
        lengths = struct.unpack(">II", take(8))
        answer, out, err = run(json.loads(take(lengths[0])), take(lengths[1]), spec, ends)
        header = json.dumps(answer).encode()
        sys.stdout.buffer.write(struct.pack(">III", len(header), len(out), len(err)) + header + out + err)
        sys.stdout.buffer.flush()


main()
