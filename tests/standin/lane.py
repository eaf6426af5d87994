"""The tests that need a device, on the stand-in: `make test-standin`. A test that is skipped fails the lane."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / part) for part in ("tests", "client", "solver", "service")] + [str(ROOT)]
# torch.set_num_threads reaches the thread that calls it and threads that begin later: an autograd thread that has begun
# would go on to sum with as many threads as before, and in another order than the caller
os.environ["OMP_NUM_THREADS"] = "1"

import pytest  # noqa: E402


class NothingSkipped:
    """Counts tests that ran, and those that did not, in whichever process."""

    def __init__(self) -> None:
        self.ran, self.skipped = 0, list[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A skip is noted."""
        if report.skipped:
            self.skipped.append(report.nodeid)
        self.ran += report.when == "call" and not report.skipped


def marked() -> list[str]:
    """The lane's tests: the client's files are read first, for collecting all of them takes as long as ten tests."""
    client = sorted((ROOT / "tests" / "client").glob("test_*.py"))
    return ["tests/standin", *(str(path) for path in client if "mark.gpu" in path.read_text())]


def main(arguments: list[str]) -> int:
    """Run the lane in two processes, or the tests that are named in one; the exit status."""
    os.chdir(ROOT)
    watch = NothingSkipped()
    wanted = arguments or ["-n", "2", "--dist", "worksteal", "-m", "gpu or standin", *marked()]
    code = int(
        pytest.main(["-q", "-p", "no:cacheprovider", "-p", "standin.plugin", "--durations=12", *wanted], [watch])
    )
    if watch.skipped or not watch.ran:
        print(f"the lane ran {watch.ran} tests and skipped {watch.skipped}: a skipped test shows nothing")
        code = code or 1
    return code


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)  # torch's own clean-up at exit looks for a CUDA runtime
