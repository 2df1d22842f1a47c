# Sourced by the other scripts: makes .venv once, installs the project, and goes to its root.
# `return` is for a shell that sources it, `exit` for one that runs it.
unset CDPATH  # with which cd may go elsewhere
if ! [[ ${NPROC:-1} =~ ^[1-9][0-9]{0,3}$ ]]; then
    echo "error: NPROC=$NPROC: must be a number from 1 to 9999" >&2
    return 2 2> /dev/null || exit 2
fi
if [ -z "${HOME:-}" ] && [[ ${NANOCHAT_BASE_DIR:-\~} == \~* ]]; then
    echo "error: HOME is not set: set it, or NANOCHAT_BASE_DIR to the whole path of a folder" >&2
    return 2 2> /dev/null || exit 2
fi
# That path begins where the user is, not at the project's root, for Python and for these scripts.
case ${NANOCHAT_BASE_DIR:-} in
"" | /*) ;;
\~ | \~/*) export NANOCHAT_BASE_DIR="$HOME${NANOCHAT_BASE_DIR#\~}" ;;
*) export NANOCHAT_BASE_DIR="$PWD/$NANOCHAT_BASE_DIR" ;;
esac
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-python3}
# Its programs and its link to the project hold the folder's name.
if [ -s .venv/installed ] && [ "$(cat .venv/installed)" != "$PWD" ]; then
    echo "error: $PWD/.venv was set up in $(cat .venv/installed): remove it, and run this again" >&2
    return 2 2> /dev/null || exit 2
fi
is_set_up() {  # what is interrupted, or older than pyproject.toml, or made by a Python that is gone, is set up again
    [ -f .venv/installed ] && ! [ pyproject.toml -nt .venv/installed ] && .venv/bin/python -c "" 2> /dev/null
}
set_up() {  # the mark comes last, after all that it stands for
    echo "Setting up .venv, once: 2.6 GB, 3 to 6 minutes, without a word until it is done"
    rm -f .venv/installed
    .venv/bin/python -c "" 2> /dev/null || rm -f .venv/bin/python*
    { .venv/bin/python -m pip --version &> /dev/null || "$PYTHON" -m venv .venv; } &&
        .venv/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]' &&
        echo "$PWD" > .venv/installed
}
if ! is_set_up; then
    mkdir -p .venv
    exec 9> .venv/lock  # two scripts started at once: the second one waits for the first
    if command -v flock > /dev/null; then flock 9; fi
    if ! is_set_up && ! set_up; then
        exec 9>&-
        echo "error: $PWD/.venv could not be set up, for the reason above: run this again" >&2
        return 1 2> /dev/null || exit 1
    fi
    exec 9>&-
fi
source .venv/bin/activate
