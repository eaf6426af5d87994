#!/bin/sh
# Build the wheel and install it twice into empty environments: alone, where it must stay thin, and with its extras.
set -eu
BUILD=${BUILD:-python3} PYTHON=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$BUILD" -m build --wheel --outdir "$work/dist" . >"$work/build.log" 2>&1 || { cat "$work/build.log"; exit 1; }
wheel=$(echo "$work"/dist/remat-*.whl)

"$PYTHON" -m venv "$work/thin"
"$work/thin/bin/pip" install --no-compile --disable-pip-version-check --quiet "$wheel"
cd "$work"
"$work/thin/bin/python" - <<'PY'
import importlib.util, sys
import remat, remat_ir
heavy = [n for n in ("numpy", "torch", "fastapi", "sqlalchemy", "highspy", "networkx") if importlib.util.find_spec(n)]
assert not heavy, f"the thin client pulls {heavy}"
assert "remat_solver" not in sys.modules, "the client imported the solver"
for package in ("remat", "remat_ir", "remat_solver", "remat_service"):
    spec = importlib.util.find_spec(package)
    assert spec and spec.origin, f"{package} is not in the wheel"
print("wheel: thin install is thin")
PY
"$work/thin/bin/remat" --help >/dev/null

"$PYTHON" -m venv "$work/full"
# what the image installs, by its hashes; then the rest over it
"$work/full/bin/pip" install --no-compile --disable-pip-version-check --quiet --require-hashes -r "$OLDPWD/docker/requirements.lock"
"$work/full/bin/pip" install --no-compile --disable-pip-version-check --quiet -c "$OLDPWD/constraints.txt" "$wheel[service,torch]"
"$work/full/bin/python" -c "import remat, remat_ir, remat_service, remat_solver, torch; print('wheel: full install has all four')"
"$work/full/bin/python" -c "import torch; assert 'remat' in torch._dynamo.list_backends(); print('wheel: torch.compile knows the backend by its name')"
"$work/full/bin/remat-service" --help >/dev/null
"$work/full/bin/python" - <<'PY'
from remat_ir import Problem, Status, graph_of, verify_answer
from remat_solver import solve

ops = 8
graph = graph_of([5] * 2 * ops, [3] * 2 * ops, [sorted({max(i - 1, 0), 2 * ops - 1 - i}) if i >= ops else [i - 1] * (i > 0) for i in range(2 * ops)])
problem = Problem(graph, 21)
answer = solve(problem, time_limit_s=60)
assert answer.status is Status.OPTIMAL and verify_answer(problem, answer).bound_ns == answer.cost_ns, answer
print("wheel: the full install proves an optimum")
PY
"$work/full/bin/python" - <<'PY'
from importlib.resources import files

service = files("remat_service")
for path in ("web/page/static/index.html", "web/examples.json"):
    assert service.joinpath(path).is_file(), f"{path} is not in the wheel"
steps = service.joinpath("storage/migrations/versions").iterdir()
assert any(step.name.endswith(".py") for step in steps), "no migration is in the wheel"
PY
"$work/full/bin/remat-service" migrate --database-url "sqlite:///$work/empty.sqlite"
echo "wheel: passed"
