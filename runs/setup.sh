# Sourced by the other scripts: makes .venv once, installs the project, and goes to its root.
unset CDPATH  # with which cd may go elsewhere
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-python3}
# Its programs and its link to the project hold the folder's name.
if [ -s .venv/installed ] && [ "$(cat .venv/installed)" != "$PWD" ]; then
    echo "error: $PWD/.venv was set up in $(cat .venv/installed): remove it, and run this again" >&2
    exit 2
fi
is_set_up() {  # what is interrupted, or older than pyproject.toml, or made by a Python that is gone, is set up again
    [ -f .venv/installed ] && ! [ pyproject.toml -nt .venv/installed ] && .venv/bin/python -c "" 2> /dev/null
}
if ! is_set_up; then
    mkdir -p .venv
    exec 9> .venv/lock  # two scripts started at once: the second one waits for the first
    if command -v flock > /dev/null; then flock 9; fi
    if ! is_set_up; then
        echo "Setting up .venv, once: 2.6 GB, about 2 minutes, without a word until it is done"
        .venv/bin/python -c "" 2> /dev/null || rm -f .venv/bin/python*
        .venv/bin/python -m pip --version &> /dev/null || "$PYTHON" -m venv .venv
        .venv/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
        echo "$PWD" > .venv/installed
    fi
    exec 9>&-
fi
source .venv/bin/activate

# Whether a folder below the base directory holds a checkpoint
has_model() { compgen -G "$NANOCHAT_BASE_DIR/$1/meta_*.json" > /dev/null; }
