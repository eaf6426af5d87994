"""The examples and three recipes run as they stand, each in a process of its own, and train as without a plan."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest
import torch
from recipes.__main__ import lacking
from recipes.training import Training, compared

from service.serving import serving
from tiers import first

EXAMPLES = Path(__file__).parents[2] / "examples"


def ended(*command: str, folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """A command, which must end well."""
    quiet = {"OMP_NUM_THREADS": "1", "REMAT_CACHE_DIR": str(folder), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, **quiet, **environ},
        cwd=folder,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def run(*command: str, folder: Path) -> str:
    """What a program of Python prints."""
    return ended(sys.executable, *command, folder=folder).stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain_loop", "torch_compile"])
def test_example_trains(name: str, tmp_path: Path) -> None:
    """Three steps, each with a loss."""
    assert run(str(EXAMPLES / f"{name}.py"), folder=tmp_path).count("step ") == 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["transformers_trainer", "lightning_module", "accelerate_loop"])
def test_trainer_losses_are_equal(name: str, tmp_path: Path) -> None:
    """The real library, from a config to three steps; the example itself asserts equal losses."""
    out = run(str(EXAMPLES / f"{name}.py"), folder=tmp_path)
    plain, planned = (re.findall(r"[\d.]+", line) for line in out.splitlines()[-2:])
    assert plain == planned
    assert len(plain) == 3


@pytest.mark.slow
def test_the_largest_batch(tmp_path: Path) -> None:
    """Each try is told; the result is one that was tried, and its measured peak is inside the budget."""
    out = run(str(EXAMPLES / "largest_batch.py"), folder=tmp_path)
    found = re.search(r"a batch of (\d+) trains within 32.0 MiB: overhead .* ([\d.]+) MiB measured", out)
    assert found is not None, out
    assert f"tried {found[1]}: trains inside the budget" in out
    assert float(found[2]) <= 32


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp2", "tensor_parallel", "pipeline"])
def test_two_ranks_share_a_plan(name: str, tmp_path: Path) -> None:
    """Some steps over gloo on both ranks, by one plan, by a divided budget, or a pipeline by a choice for both."""
    command = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "--standalone")
    out = run(*command, str(EXAMPLES / f"{name}.py"), folder=tmp_path)
    steps = 6 if name == "fsdp2" else 3
    assert out.count("rank 0 step") == out.count("rank 1 step") == steps


SRUN = """#!/bin/bash
# what srun does on one node: the command once for each task, with Slurm's variables
[[ $1 == --kill-on-bad-exit=1 ]] && shift
for task in $(seq 0 $((SLURM_NTASKS - 1))); do SLURM_PROCID=$task SLURM_LOCALID=$task "$@" & tasks+=($!); done
for task in "${tasks[@]}"; do wait "$task" || exit 1; done
"""

PYTHON = f'#!/bin/bash\nexec {sys.executable} "$@"\n'


def test_the_job_has_as_many_tasks_as_its_command_asks_for() -> None:
    """Slurm takes --ntasks-per-node for a limit alone where the script has --ntasks, which the command leaves there."""
    script = (EXAMPLES / "slurm.sbatch").read_text()
    given = set(re.findall(r"--[\w-]+", re.findall(r"sbatch (--.*) examples/slurm.sbatch", script)[0]))
    counts = {"--ntasks", "--ntasks-per-node"}
    assert set(re.findall(r"^#SBATCH (--[\w-]+)", script, re.MULTILINE)) & counts == given & counts


@pytest.mark.slow
def test_jobs_on_slurm_share_a_planner(tmp_path: Path) -> None:
    """The job script as it stands, two tasks each time, a real service: the second job finds the first one's plan."""
    commands = tmp_path / "bin"
    commands.mkdir()
    hosts = '#!/bin/bash\n[[ "$1 $2" == "show hostnames" ]] && echo "$3"\n'
    for name, text in (("srun", SRUN), ("scontrol", hosts), ("python", PYTHON)):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    with serving(tmp_path) as served:
        for job in range(2):
            environ = {
                "PATH": f"{commands}:{os.environ['PATH']}",
                "REMAT_BASE_URL": served.url,
                "REMAT_CACHE_DIR": str(tmp_path / f"cache-{job}"),
                "SLURM_JOB_ID": str(os.getpid() + job),
                "SLURM_JOB_NODELIST": "127.0.0.1",
                "SLURM_NTASKS": "2",
                "SLURM_SUBMIT_DIR": str(EXAMPLES.parent),
            }
            done = ended("bash", str(EXAMPLES / "slurm.sbatch"), folder=tmp_path, **environ)
            for rank in range(2):
                assert done.stdout.count(f"rank {rank} step") == 3
            assert "passed over" not in done.stderr, "the planner was there"
        metrics = httpx2.get(f"{served.url}/metrics", trust_env=False).text
    again = re.findall(r'^(?:remat_cache_results_total\{result="hit"\}|remat_recalls_total\{.*\}) (\S+)', metrics, re.M)
    assert sum(map(float, again)) >= 1, "the second job gets the first one's plan"


@pytest.mark.slow
def test_gradients_are_released(tmp_path: Path) -> None:
    """A step needs less than all gradients, and leaves behind the same parameters."""
    out = run(str(EXAMPLES / "release_gradients.py"), folder=tmp_path)
    gradients, plain, released = map(float, re.findall(r"\d+\.\d+", out))
    assert released < gradients < plain
    assert "bit for bit: True" in out


@pytest.mark.slow
def test_values_wait_on_the_host(tmp_path: Path) -> None:
    """The gradients are the same, and the plan says over which link."""
    out = run(str(EXAMPLES / "offload.py"), folder=tmp_path)
    assert "which may hold 64.0 MiB: 25.0 GB/s out" in out
    assert "bit for bit: True" in out


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name", first(0, ["plain_loop:bf16_autocast", "accelerate_loop", "lightning_modules:mixed"], 1)
)
def test_a_recipe_trains_as_by_aot_eager(name: str) -> None:
    command = (sys.executable, "-m", "recipes", "--here", name)
    found = subprocess.run(command, cwd=EXAMPLES.parent, check=True, capture_output=True, text=True).stdout
    assert found.splitlines()[-1].startswith("equal |")


def test_a_recipe_that_there_is_not_is_refused() -> None:
    command = (sys.executable, "-m", "recipes", "plain_lop:fp32")
    done = subprocess.run(command, cwd=EXAMPLES.parent, check=False, capture_output=True, text=True)
    assert done.returncode == 2
    assert "no recipe is called plain_lop:fp32; there are: accelerate_loop, " in done.stderr


@pytest.mark.parametrize(
    ("said", "is_lacking"),
    [
        ("ModuleNotFoundError: No module named 'torchtune'", True),
        ("ImportError: cannot import name 'Llama' from 'transformers' (/remat/.venv/transformers/__init__.py)", True),
        ("ImportError: cannot import name 'peak_by' from 'remat.planning.division' (/remat/division.py)", False),
        ("ModuleNotFoundError: No module named 'remat_solver'", False),
        ("ModuleNotFoundError: No module named 'recipes.training'", False),
        ("ValueError: no such size", False),
    ],
)
def test_a_recipe_whose_own_imports_fail_has_failed(said: str, is_lacking: bool) -> None:
    """Only what a library lacks is a reason not to run it."""
    assert lacking(said) is is_lacking


def test_what_differs_is_said(tmp_path: Path) -> None:
    def train(training: Training) -> None:
        for step in range(40):
            training.step(torch.tensor(float(training.planned and step == 7)))
        training.end("model", torch.nn.Linear(2, 2))

    faults = compared(train, str(tmp_path)).faults
    assert faults == (
        "loss 7 differs",
        "0 plans took over, 2 asked for",
        "nothing was planned, or no step of it was measured",
    )
