"""The inside of a sandbox: its first process runs one command after the other for the owner at the other end of the pipe.

Keeps true: whatever a command started is gone before its answer is sent; a command that runs out of its deadline,
memory or processes is killed with all it started; no more output than its limit is held. It ends at end of file (the
owner closed it, or died) and at the end of its life. Standard library only, no imports of ours. Waits for the owner's next request, and for the command.

    request  lengths of header and input (>II), header as JSON {command, seconds, output, env, cwd}, input
    answer   lengths of header, output, errors (>III), header as JSON {code, timed_out, truncated, seconds}, output, errors
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
import time

TICK = 0.05  # seconds between two looks at the memory and the processes in use


def drop(spec):
    """Become the sandbox's own user, for good, and out of reach of its commands."""
    if spec["uid"]:
        for folder in (spec["work"], spec["home"]):
            os.chown(folder, spec["uid"], spec["uid"])
        os.setgroups([])
        os.setresgid(*[spec["uid"]] * 3)
        os.setresuid(*[spec["uid"]] * 3)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(4, 0)  # PR_SET_DUMPABLE: no command may trace this process or use its descriptors


def limits(spec):
    """For the command's process, before it is the command."""
    for kind, value in ((resource.RLIMIT_AS, spec["memory"]), (resource.RLIMIT_CPU, spec["cpu"]),
                        (resource.RLIMIT_FSIZE, spec["disk"]), (resource.RLIMIT_CORE, 0),
                        (resource.RLIMIT_NOFILE, 512), (resource.RLIMIT_NPROC, spec["pids"])):
        if kind == resource.RLIMIT_NPROC and not spec["isolated"]:
            continue  # it would count all processes of the user
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def used():
    """Resident bytes and processes of all but this one."""
    pages = count = 0
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            try:
                with open(f"/proc/{name}/statm") as file:
                    pages += int(file.read().split()[1])
                count += 1
            except (OSError, IndexError):
                pass
    return pages * resource.getpagesize(), count


class Kept:
    """The first and the last half of `limit` bytes."""

    def __init__(self, limit):
        self.limit, self.head, self.tail, self.lost = limit, bytearray(), bytearray(), 0

    def add(self, data):
        room = max(0, self.limit - self.limit // 2 - len(self.head))
        self.head += data[:room]
        self.tail += data[room:]
        over = len(self.tail) - self.limit // 2
        if over > 0:
            self.lost += over
            del self.tail[:over]

    def value(self):
        note = b"\n... %d bytes left out ...\n" % self.lost if self.lost else b""
        return bytes(self.head) + note + bytes(self.tail)


def finish(process, isolated):
    """Kill whatever is left of a command and wait until it is gone."""
    try:
        if isolated:
            os.kill(-1, signal.SIGKILL)  # everything in this process namespace but its first process
        else:
            os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
    process.wait()
    while isolated:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            break


def run(request, given, spec, ends):
    """One command to its end; see the module's docstring for the answer."""
    started, command = time.monotonic(), request["command"]
    if isinstance(command, str):
        command = ["/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh", "-c", command]
    answer = {"code": 127, "timed_out": False, "truncated": False, "seconds": 0.0}
    try:
        process = subprocess.Popen(command, cwd=os.path.join(spec["work"], request["cwd"]), stdin=subprocess.PIPE,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=request["env"],
                                   preexec_fn=lambda: limits(spec), start_new_session=True)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return answer, b"", str(error).encode()
    out, err = Kept(request["output"]), Kept(request["output"])
    pipes = {process.stdout.fileno(): out, process.stderr.fileno(): err}
    for fd in (*pipes, process.stdin.fileno()):
        os.set_blocking(fd, False)
    watch = [0, os.pidfd_open(process.pid)] if hasattr(os, "pidfd_open") else [0]
    deadline, looked, why = min(started + request["seconds"], ends), started, ""
    while process.poll() is None and not why and not answer["timed_out"]:
        feeding = [] if process.stdin.closed else [process.stdin]
        ready, room, _ = select.select([*watch, *pipes], feeding, [], TICK if len(watch) > 1 else TICK / 10)
        if 0 in ready:
            os._exit(0)  # the owner is gone
        drain(pipes, ready)
        if room:
            given = feed(process.stdin, given)
        now = time.monotonic()
        answer["timed_out"] = now >= deadline
        if spec["isolated"] and now - looked >= TICK:
            looked, (size, count) = now, used()
            why = "memory" if size > spec["memory"] else "processes" if count > spec["pids"] else ""
    finish(process, spec["isolated"])
    while drain(pipes, list(pipes)):
        pass
    if why:
        err.add(b"\n[killed: above its limit of %s]\n" % why.encode())
    for fd in (process.stdout, process.stderr, *watch[1:]):
        os.close(fd) if isinstance(fd, int) else fd.close()
    answer |= {"code": process.returncode, "truncated": bool(out.lost or err.lost), "seconds": time.monotonic() - started}
    return answer, out.value(), err.value()


def drain(pipes, ready):
    """Take what the pipes hold; True if there was something. A pipe at its end is left out from now on."""
    got = False
    for fd in [fd for fd in ready if fd in pipes]:
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            continue
        pipes[fd].add(data)
        got = True
        if not data:
            del pipes[fd]
    return got


def feed(pipe, given):
    """Write what there is room for; the rest is returned."""
    try:
        given = given[os.write(pipe.fileno(), given[:1 << 16]):] if given else given
    except OSError:
        given = b""
    if not given:
        pipe.close()
    return given


def read(count):
    """Exactly that many bytes of the owner's; ends this process at end of file."""
    parts = []
    while count:
        data = os.read(0, min(count, 1 << 20))
        if not data:
            os._exit(0)
        parts.append(data)
        count -= len(data)
    return b"".join(parts)


def write(data):
    data = memoryview(data)
    while data:
        data = data[os.write(1, data):]


def main():
    spec = json.loads(sys.argv[1])
    ends = time.monotonic() + spec["life"]
    drop(spec)
    if spec["template"]:
        subprocess.run(["cp", "-a", spec["template"] + "/.", spec["work"]], check=True, stdout=subprocess.DEVNULL)
    write(b"ready")
    while select.select([0], [], [], max(0.0, ends - time.monotonic()))[0]:
        lengths = struct.unpack(">II", read(8))
        answer, out, err = run(json.loads(read(lengths[0])), read(lengths[1]), spec, ends)
        header = json.dumps(answer).encode()
        write(struct.pack(">III", len(header), len(out), len(err)) + header + out + err)


main()
