"""The pages as a site: it builds strictly, holds every page and picture, can be searched, and asks nobody outside."""
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from nanochat import recipes

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*ROOT.glob("*.md"), *(ROOT / "dev").glob("*.md"), *(ROOT / "dev" / "results").glob("*.md")]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site. A link or an anchor that leads nowhere, or a page left out, is an error."""
    build = pytest.importorskip("mkdocs.commands.build")
    config = pytest.importorskip("mkdocs.config").load_config(str(ROOT / "dev" / "mkdocs.yml"),
                                                              site_dir=str(tmp_path_factory.mktemp("site")))
    config.plugins.on_startup(command="build", dirty=False)
    build.build(config)
    return Path(config.site_dir)


def html_of(site: Path, page: Path) -> Path:
    path = page.relative_to(ROOT)
    return site / (path.parent if path.stem == "README" else path.with_suffix("")) / "index.html"


class Requests(HTMLParser):
    """What a browser asks for to show a page, but for links that a reader follows."""

    def __init__(self, text: str):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found += [value for name, value in attrs if name in ("src", "srcset", "href")
                       and tag not in ("a", "base") and not (tag == "link" and ("rel", "canonical") in attrs)]


def test_every_page_is_in_the_site_with_its_pictures_and_asks_nobody_outside(site):
    for page in PAGES:
        path = html_of(site, page)
        wanted = Requests(path.read_text(encoding="utf-8")).found
        assert not [url for url in wanted if re.match("[a-z]+:|//", url) and not url.startswith("data:")], page
        assert not [url for url in wanted if not (path.parent / re.sub("[?#].*", "", url)).exists()
                    and not url.startswith("data:")], page
    for sheet in site.rglob("*.css"):
        assert not re.findall(r"(?:url\(|@import )[\"']?(?:https?:)?//", sheet.read_text(encoding="utf-8")), sheet


def test_the_site_is_searched_by_a_recipes_name(site):
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    found = [entry["location"] for entry in index["docs"] if "critique_grpo_verifier" in entry["text"]]
    assert "critique_grpo_verifier" in recipes.names() and any(where.startswith("dev/recipes/") for where in found)
