"""Run inside the sandbox, as text: runs tests with pytest, without plugins and without the package's own options.

Keeps true: each run is a process of its own, with chance of its own; its line of `out` is written last, so one that was
cut short has none. Standard library and pytest only.
"""

import json
import os
import random
import sys


def main(files: list[str], out: str, runs: int, trace: bool) -> None:
    """Lines of `out`: {"code", "outcomes": {test: outcome}, "messages": {test: why}, "reached"}; see Tested.

    The first run is traced, if asked for; without that the others follow only where a test failed.
    """
    import pytest  # noqa: F401  once for all runs

    for run in range(runs):
        pid = os.fork()
        if pid == 0:
            try:
                random.seed()
                once(files, out, trace and run == 0)
            finally:
                sys.stdout.flush()
                os._exit(0)
        os.waitpid(pid, 0)
        with open(out, "a+") as file:
            file.seek(0)
            lines = file.readlines()
        if len(lines) <= run or (not trace and json.loads(lines[0])["code"] != 1):
            return


def once(files: list[str], out: str, trace: bool) -> None:
    import pytest

    here, called = os.getcwd(), set()
    outcomes, messages, reached = {}, {}, {}  # type: ignore[var-annotated]
    sys.path[:0] = [here, os.path.join(here, "src")]
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])

    def seen(frame, event, _):  # type: ignore[no-untyped-def]
        if event == "call":
            called.add((frame.f_code.co_filename, frame.f_code.co_qualname))

    class Plugin:
        def pytest_runtest_logreport(self, report):  # type: ignore[no-untyped-def]
            if report.outcome != "passed" or report.when == "call":
                outcomes[report.nodeid] = report.outcome
            if report.outcome == "failed":
                crash = getattr(report.longrepr, "reprcrash", None)
                messages[report.nodeid] = str(crash.message if crash else report.longrepr)[:2000]

        @pytest.hookimpl(wrapper=True)
        def pytest_runtest_protocol(self, item):  # type: ignore[no-untyped-def]
            called.clear()
            sys.setprofile(seen if trace else None)
            yield
            sys.setprofile(None)
            inside = {(os.path.relpath(file, here), name) for file, name in called if file.startswith(here)}
            reached.setdefault(item.nodeid.split("::")[0], set()).update(inside)
            return True

    options = ["-q", "-p", "no:cacheprovider", "-o", "addopts=", "--rootdir", here]
    answer = {"code": int(pytest.main([*options, *files], plugins=[Plugin()])), "outcomes": outcomes,
              "messages": messages, "reached": {test: sorted(calls) for test, calls in reached.items()}}
    with open(out, "a") as file:
        file.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
