"""summary.py RESULTS: adds up the test reports that .ci/run left in RESULTS and prints `N passed, N failed, N skipped`.

A report of CTest names shards of narrows_tests as tests; what each of them ran stands in a report of its own, in the build's
folder `reports`, and counts in the shard's place. A shard that failed without a failed test in its report (it crashed, say)
counts as one failure, and so does a failed step whose report shows none (a build that broke, say). What scripts/shards ran
has a report a shard. Exits with 1 on any failure.
"""

import re
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

REPORTS = ["ctest", "kernels", "pytest", "sanitize", "tsan", "neon", "neon-cases"]
BUILDS = {"ctest": "release", "sanitize": "asan"}  # whose tests are sharded
SHARD = re.compile(r"narrows_tests_\d+")


def outcome(case):
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    skipped = case.find("skipped")
    # CTest reports a test that it could not start as not run, in the same element as a skipped one.
    if case.get("status") == "notrun" and (skipped is None or not skipped.get("message", "").startswith("SKIP")):
        return "failed"
    return "passed" if skipped is None else "skipped"


def cases_of(report):
    return ElementTree.parse(report).iter("testcase")


def count_report(report, name):
    count = Counter()
    shards = report.parent.parent / BUILDS.get(name, "") / "reports"
    for case in cases_of(report):
        own, tests = shards / f"{case.get('name')}.xml", Counter()
        if SHARD.fullmatch(case.get("name")) and own.exists():
            tests = Counter(outcome(test) for test in cases_of(own))
        if not tests or (outcome(case) == "failed" and not tests["failed"]):
            tests[outcome(case)] += 1
        count += tests
    return count


def main():
    results = Path(sys.argv[1])
    failed_file = results / "failed-steps"
    failed_steps = failed_file.read_text(encoding="utf-8").split() if failed_file.exists() else []
    total = Counter()
    for name in REPORTS:
        reports, count = [*results.glob(f"{name}.xml"), *results.glob(f"{name}-[0-9]*.xml")], Counter()
        for report in reports:
            count += count_report(report, name)
        if not reports and name not in failed_steps:
            failed_steps.append(name)
        if count["failed"] and name in failed_steps:
            failed_steps.remove(name)
        print(f"{name}: {text_of(count)}")
        total += count
    for name in failed_steps:
        print(f"{name}: the step failed")
    total["failed"] += len(failed_steps)
    print(text_of(total))
    return 1 if total["failed"] else 0


def text_of(count):
    return ", ".join(f"{count[word]} {word}" for word in ("passed", "failed", "skipped"))


if __name__ == "__main__":
    sys.exit(main())
