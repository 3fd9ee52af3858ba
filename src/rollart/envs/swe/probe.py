"""Runs inside the sandbox, as text: `python -c TEXT ARGUMENTS`, with `{"files", "out", "trace"}` as JSON.

Keeps true: the tests run with pytest as it is, without plugins and without the package's own options; `out` is written
last, so a run that was cut short has none. Standard library and pytest only: nothing of rollart is imported.
"""

import json
import os
import sys


def main(files: list[str], out: str, trace: bool) -> None:
    """Write {"outcomes": {test: passed, failed, error or skipped}, "messages": {test: why}, "reached"} to `out`.

    reached: for each file of tests the functions that its tests call, each as [file, qualified name].
    """
    import pytest

    here = os.getcwd()
    sys.path[:0] = [here, os.path.join(here, "src")]
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])
    outcomes: dict[str, str] = {}
    messages: dict[str, str] = {}
    reached: dict[str, set[tuple[str, str]]] = {}
    called: set[tuple[str, str]] = set()

    def seen(frame, event, argument):  # type: ignore[no-untyped-def]
        if event == "call":
            called.add((frame.f_code.co_filename, frame.f_code.co_qualname))

    class Plugin:
        def pytest_runtest_logreport(self, report):  # type: ignore[no-untyped-def]
            test = report.nodeid
            if report.outcome == "failed":
                outcomes[test] = "failed" if report.when == "call" else "error"
                crash = getattr(report.longrepr, "reprcrash", None)
                messages[test] = str(crash.message if crash else report.longrepr)[:2000]
            elif report.when == "call" or report.outcome == "skipped":
                outcomes.setdefault(test, report.outcome)

        @pytest.hookimpl(wrapper=True)
        def pytest_runtest_protocol(self, item):  # type: ignore[no-untyped-def]
            called.clear()
            sys.setprofile(seen if trace else None)
            try:
                return (yield)
            finally:
                sys.setprofile(None)
                reached.setdefault(item.nodeid.split("::")[0], set()).update(called)

    code = pytest.main(["-q", "-p", "no:cacheprovider", "-o", "addopts=", "--rootdir", here, *files],
                       plugins=[Plugin()])
    inside = {test: sorted([os.path.relpath(file, here), name] for file, name in functions if file.startswith(here))
              for test, functions in reached.items()}
    with open(out, "w") as file:
        json.dump({"code": int(code), "outcomes": outcomes, "messages": messages, "reached": inside}, file)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
