#!/usr/bin/env bash
# Runs the tests of tests/spark with other versions of PySpark than that in .venv, from the registry, one after the other.
# What is after -- goes to pytest.
#
# Usage: scripts/test_with_pyspark.sh [version...] [-- argument...]     (default: 4.0 4.1, and the newest)
set -euo pipefail
cd "$(dirname "$0")/.."

versions=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do versions+=("$1"); shift; done
[ $# -eq 0 ] || shift
[ ${#versions[@]} -gt 0 ] || versions=(4.0 4.1 newest)

python=$PWD/.venv/bin/python
[ -x "$python" ] || { echo 'error: there is no .venv; run make test first' >&2; exit 1; }
for version in "${versions[@]}"; do
    # Beside .venv, not in it: the folder comes first on the path. PySpark 4 agrees on the version of py4j.
    folder=$PWD/build/pyspark-$version
    if [ ! -e "$folder/pyspark/version.py" ]; then
        wanted=pyspark
        [ "$version" = newest ] || wanted="pyspark==$version.*"
        "$python" -m pip install -q --disable-pip-version-check --no-deps --target "$folder" "$wanted"
    fi
    printf '%s\n' "with PySpark $(PYTHONPATH=$folder "$python" -c 'import pyspark; print(pyspark.__version__)')"
    PYTHONPATH=$folder:$PWD PYSPARK_PYTHON=$python "$python" -m pytest -q tests/spark "$@"
done
