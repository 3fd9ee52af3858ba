"""The tables at the end of `.ci/run`. Use: summary.py FOLDER

FOLDER/suites.tsv has a line a suite (name, seconds, make's exit status), FOLDER/NAME.xml its tests as pytest writes
them. Skipped is what ran in no suite: `make test` leaves out what other suites are for. A suite that failed without a
failed test (its installation, ruff, its time) counts as one. Exit status 1 unless every suite passed.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

Test = tuple[str, str]
"""Module or class, and name. Of a module that was skipped as a whole: "" and the module."""


def read(path: Path) -> dict[Test, tuple[str, str]]:
    """Outcome (passed, failed, skipped) and reason of each test. Empty where the suite did not come so far."""
    tests: dict[Test, tuple[str, str]] = {}
    if path.exists() and path.stat().st_size:
        for case in ElementTree.parse(path).iter("testcase"):
            test, outcome, reason = (case.get("classname", ""), case.get("name", "")), "passed", ""
            for part in case:
                if part.tag in ("failure", "error"):
                    outcome = "failed"
                elif part.tag == "skipped" and outcome == "passed":
                    whole = (part.text or "").strip().rpartition("Skipped: ")[2].rstrip("')")
                    outcome, reason = "skipped", part.get("message", "") if test[0] else whole
            if tests.get(test, ("",))[0] != "failed":  # an error when it is cleaned up is told as a second case
                tests[test] = outcome, reason
    return tests


def main(folder: Path) -> int:
    suites = [line.split("\t") for line in (folder / "suites.tsv").read_text().splitlines()]
    results = {name: read(folder / f"{name}.xml") for name, _, _ in suites}
    ran = {test for tests in results.values() for test, (outcome, _) in tests.items() if outcome != "skipped"}
    modules = {module for module, _ in ran}
    sums, skips, told, seconds = Counter[str](), Counter[tuple[str, str]](), set[Test](), 0
    print(f"\n{'suite':<12}{'passed':>8}{'failed':>8}{'skipped':>8}{'minutes':>9}")
    for name, took, status in suites:
        counts = Counter[str]()
        for test, (outcome, reason) in results[name].items():
            if outcome != "skipped":
                counts[outcome] += 1
            elif test not in ran and test[1] not in modules and test not in told:
                told.add(test)
                counts[outcome] += 1
                skips[name, reason] += 1
        note = ""
        if status != "0" and not counts["failed"]:
            counts["failed"], note = 1, "   out of time" if status in ("124", "137") else f"   exit status {status}"
        print(f"{name:<12}{counts['passed']:>8}{counts['failed']:>8}{counts['skipped']:>8}{int(took) / 60:>9.1f}{note}")
        sums += counts
        seconds += int(took)
    print("\nSkipped in every suite:" if skips else "\nNothing was skipped in every suite.")
    for (name, reason), count in sorted(skips.items()):
        print(f"{count:>6}  {name}: {reason}")
    parts = [f"{sums[outcome]} {outcome}" for outcome in ("failed", "passed", "skipped") if sums[outcome]]
    print(f"\n======== {', '.join(parts)} in {seconds:.2f}s ========")
    print(f"{sums['passed']} passed, {sums['failed']} failed, {sums['skipped']} skipped")
    return 1 if sums["failed"] or not sums["passed"] else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
