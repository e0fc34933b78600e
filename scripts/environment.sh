# Sourced by the other scripts: makes .venv beside the package, or reuses it.
#
# Usage: prepare_environment [EXTRA]     with EXTRA "test" for what the tests need

prepare_environment() {
    local python="${PYTHON:-python3}" extra="${1:+[$1]}"
    if [ ! -x .venv/bin/python ]; then
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
            echo "batchfinder needs Python 3.10 or newer; set PYTHON to one" >&2
            return 1
        }
        "$python" -m venv .venv
    fi
    # Nothing to do where nothing changed since the last time: the next run starts at once.
    local stamp=".venv/.installed-${1:-demo}"
    if [ ! -e "$stamp" ] || [ pyproject.toml -nt "$stamp" ] || [ scripts/constraints.txt -nt "$stamp" ]; then
        echo "Installing batchfinder into .venv ..."
        .venv/bin/python -m pip install --quiet --disable-pip-version-check \
            --constraint scripts/constraints.txt --editable ".$extra"
        touch "$stamp"
    fi
}
