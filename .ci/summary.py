"""summary.py RESULTS: adds up the test reports that .ci/run left in RESULTS and prints `N passed, N failed, N skipped`.

A failed step whose report shows no failed test (a build that broke, say) counts as one failure. Exits with 1 on any failure.
"""

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

REPORTS = ["ctest", "pytest", "sanitize", "tsan", "neon", "neon-cases"]


def outcome(case):
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    skipped = case.find("skipped")
    # CTest reports a test that it could not start as not run, in the same element as a skipped one.
    if case.get("status") == "notrun" and (skipped is None or not skipped.get("message", "").startswith("SKIP")):
        return "failed"
    return "passed" if skipped is None else "skipped"


def main():
    results = Path(sys.argv[1])
    failed_file = results / "failed-steps"
    failed_steps = failed_file.read_text(encoding="utf-8").split() if failed_file.exists() else []
    total = {"passed": 0, "failed": 0, "skipped": 0}
    for name in REPORTS:
        report = results / f"{name}.xml"
        count = dict.fromkeys(total, 0)
        if report.exists():
            for case in ElementTree.parse(report).iter("testcase"):
                count[outcome(case)] += 1
        elif name not in failed_steps:
            failed_steps.append(name)
        if count["failed"] and name in failed_steps:
            failed_steps.remove(name)
        print(f"{name}: " + ", ".join(f"{number} {word}" for word, number in count.items()))
        for word, number in count.items():
            total[word] += number
    for name in failed_steps:
        print(f"{name}: the step failed")
    total["failed"] += len(failed_steps)
    print(", ".join(f"{number} {word}" for word, number in total.items()))
    return 1 if total["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
