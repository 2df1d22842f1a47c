"""dev/tour.ipynb: all its cells run, and what they show is kept in it.

    python -m pytest tests/test_tour.py
"""
import copy
import os
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from test_documents import broken, links_of

from nanochat.common import BadInput
from scripts import tango_rl

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / "dev" / "tour.ipynb"
MOST_BYTES = 200_000
A_PATH = re.compile(r"(?<![\w.:/])/(?:home|root|tmp|usr|var|opt|mnt|work|Users)\b|[A-Z]:\\|0x[0-9a-f]{6}")
COLOURS = re.compile("\033\\[(?:3[0-7]|9[0-7]|0)m")


@pytest.fixture(scope="module")
def notebook():
    return nbformat.read(NOTEBOOK, as_version=4)


def code_of(notebook) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def kinds_of(cell) -> set[str]:
    """What a cell shows: streams, and types of data."""
    return {kind for output in cell.outputs for kind in output.get("data", [output.get("name", output.output_type)])}


def test_all_cells_run_and_show_what_is_kept(notebook, tmp_path, monkeypatch):
    """Their own asserts hold, in a process that writes nothing but temporary files."""
    for name in ("TMPDIR", "IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "of_the_user"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    made = copy.deepcopy(notebook)
    NotebookClient(made, timeout=300, resources={"metadata": {"path": str(NOTEBOOK.parent)}}).execute()
    assert list(map(kinds_of, code_of(made))) == list(map(kinds_of, code_of(notebook)))
    assert not os.path.exists(tmp_path / "of_the_user")


def test_what_the_cells_show_is_kept_and_is_text_or_a_picture(notebook):
    """In order, without errors, markup, and paths of a machine; small enough to be looked at on GitHub."""
    nbformat.validate(notebook)
    cells = code_of(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        assert cell.outputs and kinds_of(cell) <= {"stdout", "text/plain", "image/png"}
    texts = [output.get("text", output.get("data", {}).get("text/plain")) for cell in cells for output in cell.outputs]
    shown = COLOURS.sub("", "\n".join(texts))
    assert "\033" not in shown and not A_PATH.findall(shown)
    assert NOTEBOOK.stat().st_size <= MOST_BYTES


def test_links_of_the_notebook_lead_somewhere(notebook):
    links = [link for cell in notebook.cells if cell.cell_type == "markdown" for link in links_of(cell.source)]
    assert links and not [link for link in links if broken(NOTEBOOK, link)]


def test_a_run_that_is_begun_by_hand_refuses_an_unknown_flag_in_one_line():
    with pytest.raises(BadInput, match="--model-tags pair; did you mean --model-tag") as error:
        tango_rl.begin(["--model-tags", "pair"])
    assert "\n" not in str(error.value)
