# Sourced by the other scripts: makes .venv once, installs the project, and goes to its root.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-python3}
if [ ! -f .venv/installed ] || [ pyproject.toml -nt .venv/installed ]; then
    echo "Setting up .venv, once: 2.6 GB, about 2 minutes, without a word until it is done"
    [ -x .venv/bin/python ] || "$PYTHON" -m venv .venv
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
    touch .venv/installed
fi
source .venv/bin/activate

# Whether a folder below the base directory holds a checkpoint
has_model() { compgen -G "$NANOCHAT_BASE_DIR/$1/meta_*.json" > /dev/null; }
